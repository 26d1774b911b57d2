//! Chores of the repository.

fn main() {
    println!("usage: cargo xtask CHORE");
}

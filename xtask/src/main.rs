//! Chores of the repository: `cargo xtask CHORE`.

mod budget;
mod kernels;
mod nvrtc;
mod toolchain;

use anyhow::{Result, bail};
use std::path::Path;

const USAGE: &str = "usage: cargo xtask kernels [--check]

kernels          compiles crates/device/kernels/*.cu to PTX and machine code in kernels/built
kernels --check  compiles again, compares with kernels/built, and holds every kernel to
                 kernels/budget.txt
";

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["kernels"] => kernels::build(&root),
        ["kernels", "--check"] => kernels::check(&root),
        _ => bail!("{USAGE}"),
    }
}

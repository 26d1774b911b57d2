//! Files that the command line names.

use crate::failure::{Failure, Outcome};
use anyhow::{Context, bail};
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// Longest prompt, schema, grammar or file of settings, in bytes.
pub const LONGEST: u64 = 64 << 20;

/// The text of a file, or of standard input if the path is `-`.
///
/// # Errors
/// If it cannot be read, is no UTF-8, or is longer than [`LONGEST`]: a file without end would fill
/// the memory.
pub fn text(path: &Path) -> anyhow::Result<String> {
    if path.as_os_str() == "-" {
        return read(std::io::stdin().lock(), LONGEST).context("cannot read standard input");
    }
    let read = || read(File::open(path)?, LONGEST);
    read().with_context(|| format!("cannot read {}", path.display()))
}

/// The text of the file that `option` names; it is the command line's fault if there is none.
pub fn given(path: &Path, option: &str) -> Outcome<String> {
    text(path).map_err(|error| Failure::option(option, &error))
}

fn read(from: impl Read, most: u64) -> anyhow::Result<String> {
    let mut text = String::new();
    from.take(most + 1).read_to_string(&mut text)?;
    if text.len() as u64 > most {
        bail!("it holds more than {most} bytes");
    }
    Ok(text)
}

/// Whether two paths lead to one file, by whatever links. A path that leads nowhere is no file.
pub fn are_one(a: &Path, b: &Path) -> bool {
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt;
        let place = |path: &Path| std::fs::metadata(path).map(|m| (m.dev(), m.ino()));
        matches!((place(a), place(b)), (Ok(a), Ok(b)) if a == b)
    }
    #[cfg(not(unix))]
    {
        matches!((a.canonicalize(), b.canonicalize()), (Ok(a), Ok(b)) if a == b)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_than_the_limit_is_refused() {
        assert_eq!(read(&b"four"[..], 4).expect("it fits"), "four");
        let error = read(std::io::repeat(b'a'), 4).expect_err("it has no end");
        assert!(error.to_string().contains("more than 4 bytes"), "{error}");
        assert!(read(&b"\xff"[..], 4).is_err());
    }

    #[test]
    fn a_file_is_known_by_its_links() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = |name: &str| folder.path().join(name);
        for name in ["a", "b"] {
            std::fs::write(file(name), "x").expect("it writes");
        }
        std::fs::hard_link(file("a"), file("hard")).expect("a link");
        assert!(are_one(&file("a"), &file(".").join("a")));
        assert!(!are_one(&file("a"), &file("b")));
        assert!(!are_one(&file("none"), &file("none")));
        #[cfg(unix)]
        {
            std::os::unix::fs::symlink(file("a"), file("soft")).expect("a link");
            assert!(are_one(&file("a"), &file("soft")) && are_one(&file("hard"), &file("soft")));
        }
    }
}

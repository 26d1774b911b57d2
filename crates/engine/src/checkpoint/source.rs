//! Where a checkpoint's files come from.

use super::CheckpointError;
use bytes::Bytes;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// A folder, or files inside the binary.
#[derive(Clone, Debug)]
pub enum Source {
    /// A folder. Its shards are mapped: they must not be changed or cut while they are in use.
    Directory(PathBuf),
    /// `(file name, content)`.
    Embedded(&'static [(&'static str, &'static [u8])]),
}

impl Source {
    /// The folder `path`.
    pub fn directory(path: impl AsRef<Path>) -> Self {
        Source::Directory(path.as_ref().to_owned())
    }

    /// What messages call this source.
    pub fn place(&self) -> String {
        match self {
            Source::Directory(path) => path.display().to_string(),
            Source::Embedded(_) => "the checkpoint inside this binary".into(),
        }
    }

    /// The content of a small file, read into memory; `None` if there is no such file.
    pub fn read(&self, name: &str) -> Result<Option<Bytes>, CheckpointError> {
        match self {
            Source::Directory(folder) => {
                let path = folder.join(name);
                absent_is_none(&path, std::fs::read(&path).map(Bytes::from))
            }
            Source::Embedded(files) => Ok(embedded(files, name)),
        }
    }

    /// When a file of a folder was last changed, where the file system tells it.
    pub(crate) fn modified(&self, name: &str) -> Option<SystemTime> {
        match self {
            Source::Directory(folder) => std::fs::metadata(folder.join(name)).ok()?.modified().ok(),
            Source::Embedded(_) => None,
        }
    }

    /// The content of a large file, not read yet: pages come from the disk when they are touched.
    /// `None` if there is no such file.
    pub fn map(&self, name: &str) -> Result<Option<Bytes>, CheckpointError> {
        match self {
            Source::Directory(folder) => {
                let path = folder.join(name);
                absent_is_none(&path, map_file(&path))
            }
            Source::Embedded(files) => Ok(embedded(files, name)),
        }
    }
}

fn embedded(files: &'static [(&str, &[u8])], name: &str) -> Option<Bytes> {
    let (_, content) = files.iter().find(|(file, _)| *file == name)?;
    Some(Bytes::from_static(content))
}

fn map_file(path: &Path) -> std::io::Result<Bytes> {
    let file = File::open(path)?;
    if file.metadata()?.len() == 0 {
        return Ok(Bytes::new());
    }
    // SAFETY: the map is read-only and private to this process. Changing or truncating the file
    // meanwhile is undefined; `Source::Directory` passes that condition on to the caller.
    let map = unsafe { memmap2::Mmap::map(&file)? };
    Ok(Bytes::from_owner(map))
}

fn absent_is_none(
    path: &Path,
    result: std::io::Result<Bytes>,
) -> Result<Option<Bytes>, CheckpointError> {
    match result {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(CheckpointError::Io { file: path.display().to_string(), source }),
    }
}

//! What the environment decides, read once.

use std::path::PathBuf;
use std::sync::OnceLock;

/// Settings of the process. No other place reads the environment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Settings {
    /// Where computed tables are kept: `DEEPINFER_CACHE_DIR`, else `deepinfer` in the user's cache
    /// directory; `None` if there is neither, or the variable is empty.
    pub cache_dir: Option<PathBuf>,
}

impl Settings {
    /// The settings, as they were at the first call.
    pub fn get() -> &'static Settings {
        static SETTINGS: OnceLock<Settings> = OnceLock::new();
        SETTINGS.get_or_init(|| {
            let cache_dir = match std::env::var_os("DEEPINFER_CACHE_DIR") {
                Some(folder) => Some(PathBuf::from(folder)).filter(|f| !f.as_os_str().is_empty()),
                None => dirs::cache_dir().map(|folder| folder.join("deepinfer")),
            };
            Settings { cache_dir }
        })
    }
}

//! The compilers, from NVIDIA's Python packages: pinned, downloaded once, never installed.

use anyhow::{Context, Result, ensure};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// NVRTC, the headers that kernels may include, and ptxas: one release.
const PACKAGES: [&str; 3] = [
    "nvidia-cuda-nvrtc-cu12==12.4.127",
    "nvidia-cuda-runtime-cu12==12.4.127",
    "nvidia-cuda-nvcc-cu12==12.4.131",
];

/// Where the parts are.
pub struct Toolchain {
    pub nvrtc: PathBuf,
    pub nvrtc_builtins: PathBuf,
    pub include: PathBuf,
    pub ptxas: PathBuf,
}

/// The tool chain in `target/cuda-toolchain`, downloaded if it is not there.
pub fn get(root: &Path) -> Result<Toolchain> {
    let folder = root.join("target/cuda-toolchain");
    let base = folder.join("nvidia");
    let toolchain = Toolchain {
        nvrtc: base.join("cuda_nvrtc/lib/libnvrtc.so.12"),
        nvrtc_builtins: base.join("cuda_nvrtc/lib/libnvrtc-builtins.so.12.4"),
        include: base.join("cuda_runtime/include"),
        ptxas: base.join("cuda_nvcc/bin/ptxas"),
    };
    let (done, pins) = (folder.join("complete"), PACKAGES.join("\n"));
    if std::fs::read_to_string(&done).ok().as_ref() != Some(&pins) {
        if folder.exists() {
            std::fs::remove_dir_all(&folder)?;
        }
        download(&folder)?;
        // The archive does not keep the permission.
        let mode = std::fs::Permissions::from_mode(0o755);
        std::fs::set_permissions(&toolchain.ptxas, mode).context("ptxas")?;
        std::fs::write(done, pins)?;
    }
    Ok(toolchain)
}

fn download(folder: &Path) -> Result<()> {
    std::fs::create_dir_all(folder)?;
    eprintln!("downloading the CUDA compilers to {}", folder.display());
    let mut pip = Command::new("python3");
    pip.args(["-m", "pip", "download", "--quiet", "--no-deps", "--dest"]).arg(folder);
    run(pip.args(PACKAGES))?;
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        if path.extension().is_some_and(|end| end == "whl") {
            run(Command::new("python3").args(["-m", "zipfile", "-e"]).arg(&path).arg(folder))?;
            std::fs::remove_file(path)?;
        }
    }
    Ok(())
}

fn run(command: &mut Command) -> Result<()> {
    let status = command.status().with_context(|| format!("starting {command:?}"))?;
    ensure!(status.success(), "{command:?} failed: {status}");
    Ok(())
}

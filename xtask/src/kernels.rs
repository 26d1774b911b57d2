//! Compiling kernels.

use crate::budget::{Budget, Usage, parse_usage};
use crate::nvrtc::Nvrtc;
use crate::toolchain::{self, Toolchain};
use anyhow::{Context, Result, anyhow, ensure};
use flate2::Compression;
use flate2::read::GzDecoder;
use flate2::write::GzEncoder;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Architectures with machine code of their own; others run the PTX.
const ARCHITECTURES: [&str; 4] = ["sm_80", "sm_86", "sm_89", "sm_90"];
/// What the built files may take together.
const MOST_BYTES: usize = 8 << 20;

/// One file of kernels, compiled.
struct Built {
    /// File name without `.gz`, and contents.
    files: Vec<(String, Vec<u8>)>,
    /// What the kernels use, by architecture.
    usage: Vec<(&'static str, Vec<Usage>)>,
}

fn folder(root: &Path) -> PathBuf {
    root.join("crates/device/kernels")
}

/// The names of the files of kernels, sorted.
fn stems(folder: &Path) -> Result<Vec<String>> {
    let mut stems = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        if path.extension().is_some_and(|end| end == "cu") {
            stems.extend(path.file_stem().map(|stem| stem.to_string_lossy().into_owned()));
        }
    }
    stems.sort();
    Ok(stems)
}

fn compile(toolchain: &Toolchain, nvrtc: &Nvrtc, folder: &Path, stem: &str) -> Result<Built> {
    let file = format!("{stem}.cu");
    let source = std::fs::read_to_string(folder.join(&file)).context(file.clone())?;
    let options = [
        "--gpu-architecture=compute_80".to_owned(),
        "--std=c++17".to_owned(),
        "--device-as-default-execution-space".to_owned(),
        // Sums and products are fused where the source says so.
        "--fmad=false".to_owned(),
        format!("--include-path={}", folder.display()),
        format!("--include-path={}", toolchain.include.display()),
    ];
    let ptx = nvrtc.compile(&file, &source, &options).context(file)?;
    let temporary = folder.join("../../../target/cuda-toolchain");
    let ptx_file = temporary.join(format!("{stem}.ptx"));
    std::fs::write(&ptx_file, &ptx)?;
    let mut built = Built { files: vec![(format!("{stem}.ptx"), ptx)], usage: Vec::new() };
    // The longest part of the work, so the architectures are done side by side.
    let assemble = &|architecture: &str| -> Result<(Vec<u8>, Vec<Usage>)> {
        let binary = temporary.join(format!("{stem}.{architecture}.cubin"));
        let output = Command::new(&toolchain.ptxas)
            .args(["-v", &format!("-arch={architecture}")])
            .arg(&ptx_file)
            .arg("-o")
            .arg(&binary)
            .output()
            .context("starting ptxas")?;
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(output.status.success(), "ptxas, {stem} for {architecture}: {text}");
        Ok((std::fs::read(binary)?, parse_usage(&text)))
    };
    let results = std::thread::scope(|scope| {
        let threads = ARCHITECTURES.map(|name| (name, scope.spawn(move || assemble(name))));
        threads.map(|(name, thread)| (name, thread.join()))
    });
    for (architecture, result) in results {
        let (binary, usage) =
            result.map_err(|_| anyhow!("a thread for {architecture} failed"))??;
        built.files.push((format!("{stem}.{architecture}.cubin"), binary));
        built.usage.push((architecture, usage));
    }
    Ok(built)
}

fn compile_all(root: &Path) -> Result<Vec<Built>> {
    let toolchain = toolchain::get(root)?;
    let nvrtc = Nvrtc::load(&toolchain)?;
    let folder = folder(root);
    stems(&folder)?.iter().map(|stem| compile(&toolchain, &nvrtc, &folder, stem)).collect()
}

/// Compiles all kernels, and writes what changed.
pub fn build(root: &Path) -> Result<()> {
    let target = folder(root).join("built");
    std::fs::create_dir_all(&target)?;
    let all = compile_all(root)?;
    let mut names = Vec::new();
    let mut bytes = 0;
    for (name, contents) in all.iter().flat_map(|built| &built.files) {
        let path = target.join(format!("{name}.gz"));
        if unpack(&path).ok().as_ref() != Some(contents) {
            let mut packer = GzEncoder::new(Vec::new(), Compression::best());
            packer.write_all(contents)?;
            std::fs::write(&path, packer.finish()?)?;
        }
        bytes += std::fs::metadata(&path)?.len() as usize;
        names.push(path);
    }
    for entry in std::fs::read_dir(&target)? {
        let path = entry?.path();
        if !names.contains(&path) {
            std::fs::remove_file(path)?;
        }
    }
    for (architecture, kernels) in all.iter().flat_map(|built| &built.usage) {
        for Usage { kernel, registers, shared, local } in kernels {
            println!(
                "{architecture} {kernel}: {registers} registers, {shared} shared, {local} local"
            );
        }
    }
    println!("{} files, {} KiB", names.len(), bytes >> 10);
    ensure!(bytes <= MOST_BYTES, "the built kernels take {bytes} bytes of {MOST_BYTES}");
    budget(root, &all)
}

/// Compiles all kernels, and complains if anything differs or exceeds its budget.
pub fn check(root: &Path) -> Result<()> {
    let target = folder(root).join("built");
    let all = compile_all(root)?;
    for (name, contents) in all.iter().flat_map(|built| &built.files) {
        let have = unpack(&target.join(format!("{name}.gz"))).context(name.clone())?;
        ensure!(have == *contents, "{name} is not what its source gives: run cargo xtask kernels");
    }
    let files = all.iter().map(|built| built.files.len()).sum::<usize>();
    let have = std::fs::read_dir(&target)?.count();
    ensure!(have == files, "{} holds {have} files, {files} belong there", target.display());
    budget(root, &all)?;
    println!("{files} files are as their sources; every kernel keeps to its budget");
    Ok(())
}

fn unpack(path: &Path) -> Result<Vec<u8>> {
    let mut contents = Vec::new();
    GzDecoder::new(std::fs::File::open(path)?).read_to_end(&mut contents)?;
    Ok(contents)
}

fn budget(root: &Path, all: &[Built]) -> Result<()> {
    let path = folder(root).join("budget.txt");
    let budget = Budget::parse(&std::fs::read_to_string(&path).context("budget.txt")?)?;
    let mut complaints = Vec::new();
    for (architecture, kernels) in all.iter().flat_map(|built| &built.usage) {
        let found = kernels.iter().filter_map(|usage| budget.complaint(usage));
        complaints.extend(found.map(|complaint| format!("{architecture}: {complaint}")));
    }
    ensure!(complaints.is_empty(), "over budget:\n{}", complaints.join("\n"));
    Ok(())
}

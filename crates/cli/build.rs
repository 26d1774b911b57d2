//! Embeds the demo model: every file of `models/demo` that a checkpoint is made of.

use std::fmt::Write;
use std::path::Path;

fn main() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo");
    println!("cargo::rerun-if-changed={}", folder.display());
    let mut code = String::new();
    list(&folder, "MODEL", "Files of the checkpoint: name and content.", &mut code);
    list(&folder.join("eval"), "TASKS", "Files of its tasks: name and content.", &mut code);
    let out = std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR");
    std::fs::write(Path::new(&out).join("demo.rs"), code).expect("OUT_DIR can be written");
}

fn list(folder: &Path, name: &str, doc: &str, code: &mut String) {
    let mut files: Vec<_> = std::fs::read_dir(folder)
        .map(|entries| entries.filter_map(Result::ok).map(|e| e.path()).collect())
        .unwrap_or_default();
    files.retain(|path| {
        let extension = path.extension().and_then(|e| e.to_str());
        path.is_file() && matches!(extension, Some("json" | "jsonl" | "gz" | "safetensors"))
    });
    files.sort();
    let _ = writeln!(code, "/// {doc}\npub static {name}: &[(&str, &[u8])] = &[");
    for path in files {
        println!("cargo::rerun-if-changed={}", path.display());
        let file = path.file_name().unwrap_or_default().to_string_lossy();
        let _ = writeln!(code, "    ({file:?}, include_bytes!({:?})),", path.display().to_string());
    }
    code.push_str("];\n");
}

//! Compiles the C library of the thumbnail example to `target/PROFILE/libthumbnail.so`, where `workers.toml` expects
//! the library.

use std::path::{Path, PathBuf};
use std::process::Command;

fn main() {
    let folder =
        PathBuf::from(std::env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets CARGO_MANIFEST_DIR"));
    let source = folder.join("thumbnail/thumbnail.c");
    let include = folder.join("../worker/include");
    println!("cargo::rerun-if-changed={}", folder.join("thumbnail").display());
    println!("cargo::rerun-if-changed={}", include.display());
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    // `OUT_DIR` is `target/PROFILE/build/PACKAGE-HASH/out`.
    let profile = out.ancestors().nth(3).unwrap_or(Path::new("."));
    let library = profile.join("libthumbnail.so");
    let compiler = std::env::var_os("CC").unwrap_or_else(|| "cc".into());
    let status = Command::new(&compiler)
        .args(["-O2", "-w", "-shared", "-fPIC", "-I"])
        .arg(&include)
        .arg("-o")
        .arg(&library)
        .arg(&source)
        .arg("-lm")
        .status();
    match status {
        Ok(status) if status.success() => {}
        Ok(status) => panic!("the C compiler {} exited with {status}", compiler.display()),
        Err(error) => panic!("failed to run the C compiler {}: {error}", compiler.display()),
    }
}

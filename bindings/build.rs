//! Has the Python module's line tables compressed, which take most of its bytes: what reads them
//! (backtraces, perf, gdb) reads them compressed too.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    if std::env::var("CARGO_CFG_TARGET_OS").is_ok_and(|system| system == "linux") {
        println!("cargo::rustc-cdylib-link-arg=-Wl,--compress-debug-sections=zlib");
    }
}

//! Gives the shared library the name under which programs that were linked against libblkio 1 look
//! for it.

fn main() {
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libblkio.so.1");
    println!("cargo::rerun-if-changed=build.rs");
}

//! How the examples name a device: `DRIVER:PROPERTY=VALUE,PROPERTY=VALUE`, as in
//! `io_uring:path=disk.img,direct=true`.

use blkio::{Builder, Result};

/// The device that `spec` describes, not open yet.
pub fn device(spec: &str) -> Result<Builder> {
    let (driver, properties) = spec.split_once(':').unwrap_or((spec, ""));
    let mut builder = Builder::new(driver)?;
    for property in properties.split(',').filter(|property| !property.is_empty()) {
        let (name, value) = property.split_once('=').unwrap_or((property, "true"));
        builder = builder.set(name, value)?;
    }
    Ok(builder)
}

/// Says what went wrong and ends the program with status 1.
pub fn report(result: Result<()>) {
    if let Err(error) = result {
        eprintln!("error: {error} (errno {})", error.errno());
        std::process::exit(1);
    }
}

//! Prints all properties of a device: `info io_uring:path=disk.img`

mod common;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match &arguments[..] {
        [spec] => common::report(info(spec)),
        _ => {
            eprintln!("usage: info DRIVER:PROPERTY=VALUE,…");
            std::process::exit(2);
        }
    }
}

fn info(spec: &str) -> blkio::Result<()> {
    let device = common::device(spec)?.start()?;
    for name in device.property_names() {
        println!("{name} = {}", device.value(name)?);
    }
    Ok(())
}

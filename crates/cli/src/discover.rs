//! `freestone discover`: lists what a discovery service knows of.

use crate::error::Error;
use crate::output::Output;
use crate::parse::CommonArgs;
use drivers_nvme_tcp::{Cancel, DiscoveryEntry};
use drivers_rbd::{ClusterOptions, FoundImage, FoundPool};
use serde_json::{Value, json};
use stack::kinds::discovery::{self, Service};

/// The arguments of `freestone discover`.
#[derive(clap::Args, Debug)]
pub struct DiscoverArgs {
    /// The discovery service, such as nvme-tcp:address=10.0.0.1:4420 or rbd:user=vms
    #[arg(value_name = "KIND:KEY=VALUE,…")]
    service: String,
    #[command(flatten)]
    pub(crate) common: CommonArgs,
}

/// Prints a line for each path to a subsystem, or for each pool and image.
///
/// # Errors
/// When the service does not answer, or its answer is invalid.
pub fn run(args: &DiscoverArgs) -> Result<(), Error> {
    let output = Output::new(args.common.json);
    match discovery::parse(&args.service).map_err(|error| Error::Usage(error.to_string()))? {
        Service::NvmeTcp(options) => list_subsystems(&options, &output),
        Service::Rbd(options) => list_images(&options, &output),
    }
}

fn list_images(options: &ClusterOptions, output: &Output) -> Result<(), Error> {
    let pools = drivers_rbd::list(options).map_err(|error| Error::Runtime(error.to_string()))?;
    for FoundPool { name, images } in &pools {
        let error = images.as_ref().err();
        let failed = error.map(|error| format!(": {error}")).unwrap_or_default();
        output.event(
            "pool",
            format!("pool   {}{failed}", name.escape_debug()),
            json!({ "pool": name, "error": error }),
        );
        for image in images.iter().flatten() {
            output.event("image", format!("image  {}", spec(name, image)), image_fields(name, image));
        }
    }
    Ok(())
}

/// The image as `--device` takes it, without the options of the cluster. Escaped, since a cluster
/// could send control characters for the terminal.
fn spec(pool: &str, FoundImage { namespace, name }: &FoundImage) -> String {
    let namespace = if namespace.is_empty() { String::new() } else { format!(",namespace={namespace}") };
    format!("rbd:pool={pool}{namespace},image={name}").escape_debug().to_string()
}

fn image_fields(pool: &str, FoundImage { namespace, name }: &FoundImage) -> Value {
    json!({ "pool": pool, "namespace": namespace, "image": name })
}

fn list_subsystems(options: &drivers_nvme_tcp::Options, output: &Output) -> Result<(), Error> {
    let entries = drivers_nvme_tcp::discover(options, &Cancel::never())
        .map_err(|error| Error::Runtime(format!("{}: {error}", options.address)))?;
    let widest = entries.iter().map(|entry| address(entry).len()).max().unwrap_or(0);
    for entry in &entries {
        output.event("subsystem", line(entry, widest), fields(entry));
    }
    Ok(())
}

/// Text of SUBTYPE (Base 5.16.1.23).
fn kind(entry: &DiscoveryEntry) -> String {
    match entry.subtype {
        1 => "referral".into(),
        2 => "nvm".into(),
        3 => "discovery".into(),
        other => format!("type-{other}"),
    }
}

/// Text of TRTYPE.
fn transport(entry: &DiscoveryEntry) -> String {
    match entry.transport {
        1 => "rdma".into(),
        2 => "fc".into(),
        3 => "tcp".into(),
        254 => "loop".into(),
        other => format!("transport-{other}"),
    }
}

fn address(entry: &DiscoveryEntry) -> String {
    match (entry.address.contains(':'), entry.service.is_empty()) {
        (_, true) => entry.address.clone(),
        (true, false) => format!("[{}]:{}", entry.address, entry.service),
        (false, false) => format!("{}:{}", entry.address, entry.service),
    }
}

fn line(entry: &DiscoveryEntry, widest: usize) -> String {
    // The address is escaped, since a service could send control characters for the terminal.
    let address = address(entry).escape_debug().to_string();
    let tls = if entry.transport == 3 && entry.security != 0 { "  TLS" } else { "" };
    format!("{:<9}  {:<4}  {address:<widest$}  {}{tls}", kind(entry), transport(entry), entry.subsystem)
}

fn fields(entry: &DiscoveryEntry) -> Value {
    json!({
        "kind": kind(entry),
        "transport": transport(entry),
        "address": entry.address,
        "service": entry.service,
        "nqn": entry.subsystem.as_str(),
        "port": entry.port_id,
        "controller": entry.controller_id,
        "requirements": entry.requirements,
        "security": entry.security,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use drivers_nvme_tcp::Nqn;

    #[test]
    fn an_image_is_printed_as_a_device() {
        let mut image = FoundImage { namespace: String::new(), name: "vm1".into() };
        assert_eq!(spec("rbd", &image), "rbd:pool=rbd,image=vm1");
        image.namespace = "t\x1b".into();
        assert_eq!(spec("rbd", &image), "rbd:pool=rbd,namespace=t\\u{1b},image=vm1");
        assert_eq!(image_fields("rbd", &image)["image"], "vm1");
    }

    #[test]
    fn a_line_names_what_it_is_where_it_is_and_what_it_is_called() {
        let name = Nqn::new("nqn.2014-08.org.example:disk").unwrap();
        let entry = DiscoveryEntry::tcp("10.0.0.1:4420".parse().unwrap(), name.clone());
        assert_eq!(line(&entry, 15), "nvm        tcp   10.0.0.1:4420    nqn.2014-08.org.example:disk");
        assert_eq!(fields(&entry)["service"], "4420");
        let entry = DiscoveryEntry::tcp("[fe80::1]:8009".parse().unwrap(), Nqn::discovery());
        assert_eq!(line(&entry, 0), format!("discovery  tcp   [fe80::1]:8009  {}", Nqn::discovery()));
        let strange = DiscoveryEntry { transport: 9, subtype: 7, address: "\x1b[2J".into(), ..entry };
        let said = line(&strange, 0);
        assert!(said.starts_with("type-7     transport-9") && !said.contains('\x1b'), "{said}");
        let secure =
            DiscoveryEntry { security: 1, ..DiscoveryEntry::tcp("10.0.0.1:1".parse().unwrap(), name) };
        assert!(line(&secure, 0).ends_with("  TLS"));
    }
}

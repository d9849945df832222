//! The clients that are connected to exports.

use super::Engine;
use crate::api_error::ApiError;
use api::Client;
use exports::{Connection, Moved};
use std::collections::BTreeMap;

impl Engine {
    /// The clients of an export, the oldest first; none while it is not served.
    ///
    /// # Errors
    /// When there is no such export.
    pub fn clients(&self, name: &str) -> Result<Vec<Client>, ApiError> {
        let live = self.live();
        live.export_record(name)?;
        let running = live.exports.get(name).and_then(|running| running.as_ref().ok());
        Ok(running.map(|running| grouped(running.export.stats().client_connections())).unwrap_or_default())
    }

    /// The bytes of each NVMe host since the start of each export, by export and NQN.
    pub fn nvme_hosts(&self) -> Vec<(String, BTreeMap<String, Moved>)> {
        let live = self.live();
        let running = live.exports.iter().filter_map(|(name, running)| Some((name, running.as_ref().ok()?)));
        running.map(|(name, running)| (name.clone(), running.export.stats().client_hosts())).collect()
    }
}

/// The clients of connections: the queues of an NVMe controller are one.
fn grouped(connections: Vec<Connection>) -> Vec<Client> {
    let mut clients: Vec<Client> = Vec::new();
    let mut controllers: BTreeMap<(Option<String>, u16), usize> = BTreeMap::new();
    for Connection { peer, since_ns, bytes } in connections {
        let controller = peer.queue.map(|queue| queue.controller);
        let is_io = peer.queue.is_some_and(|queue| queue.queue > 0);
        let known = controller.and_then(|id| controllers.get(&(peer.host.clone(), id)));
        let Some(client) = known.map(|place| &mut clients[*place]) else {
            if let Some(id) = controller {
                controllers.insert((peer.host.clone(), id), clients.len());
            }
            clients.push(Client {
                address: peer.address,
                host: peer.host,
                controller,
                queues: controller.map(|_| is_io.into()),
                since_ns,
                is_secured: peer.is_secured,
                is_authenticated: peer.is_authenticated,
                read_bytes: bytes.map(|moved| moved.read),
                written_bytes: bytes.map(|moved| moved.written),
            });
            continue;
        };
        let add = |sum: &mut Option<u64>, bytes: Option<u64>| {
            *sum = sum.zip(bytes).map(|(sum, bytes)| sum.saturating_add(bytes));
        };
        client.queues = client.queues.map(|queues| queues.saturating_add(is_io.into()));
        client.since_ns = client.since_ns.min(since_ns);
        client.is_secured &= peer.is_secured;
        client.is_authenticated &= peer.is_authenticated;
        add(&mut client.read_bytes, bytes.map(|moved| moved.read));
        add(&mut client.written_bytes, bytes.map(|moved| moved.written));
    }
    clients
}

#[cfg(test)]
mod tests {
    use super::*;
    use exports::{NvmeQueue, Peer};

    #[test]
    fn the_queues_of_a_controller_are_one_client() {
        let queue = |host: &str, controller, queue, is_secured| Connection {
            peer: Peer {
                address: Some(format!("10.0.0.1:{queue}")),
                host: Some(host.into()),
                is_secured,
                is_authenticated: is_secured,
                queue: Some(NvmeQueue { controller, queue }),
            },
            since_ns: 100 + u64::from(queue),
            bytes: Some(Moved { read: 512, written: 4096 }),
        };
        let other = Connection { peer: Peer::default(), since_ns: 7, bytes: None };
        let connections = vec![
            queue("a", 1, 0, true),
            queue("b", 2, 0, true),
            queue("a", 1, 1, true),
            queue("a", 1, 2, false),
            other,
        ];
        let clients = grouped(connections);
        assert_eq!(clients.len(), 3);
        let host = &clients[0];
        assert_eq!((host.host.as_deref(), host.controller, host.queues), (Some("a"), Some(1), Some(2)));
        assert_eq!((host.address.as_deref(), host.since_ns), (Some("10.0.0.1:0"), 100));
        assert_eq!((host.read_bytes, host.written_bytes), (Some(1536), Some(12288)));
        assert!(!host.is_secured && clients[1].is_authenticated, "one of its queues is not");
        assert_eq!(clients[1].queues, Some(0));
        assert_eq!(
            (clients[2].queues, clients[2].address.as_ref(), clients[2].read_bytes),
            (None, None, None)
        );
    }
}

//! Volumes of this driver that the cluster does not know: those that no handle of a persistent
//! volume names. A kill of the orchestrator, or of a cluster, leaves them behind.
//!
//! A volume may be so new that the cluster has no handle of it yet. So volumes are deleted only if
//! an earlier list has them, too.

use crate::controller::Controller;
use crate::fault::{Fault, Result};
use crate::ids::VolumeId;
use crate::proto::DeleteVolumeRequest;
use api::Volume;
use std::collections::HashSet;

/// A volume without a handle.
pub struct Orphan {
    /// Its identity, as a handle would have it.
    pub id: VolumeId,
    volume: Volume,
}

impl Orphan {
    /// One line: the identity, the size in bytes, the volume's name, and the claim it was made for.
    pub fn line(&self) -> String {
        let Orphan { id, volume } = self;
        let label = |key: &str| volume.labels.get(key).map_or("", String::as_str);
        let (namespace, claim) = (label("csi.namespace"), label("csi.pvc"));
        format!("{id}\t{}\t{}\t{namespace}/{claim}", volume.size_bytes, volume.name)
    }
}

/// The first word of each line.
pub fn handles(text: &str) -> HashSet<String> {
    text.lines().filter_map(|line| line.split_whitespace().next()).map(str::to_owned).collect()
}

/// The volumes of this driver that no handle names, in the order of backends and identities.
///
/// # Errors
/// When a backend does not answer. Also when no handle is one of this driver's, unless
/// `may_be_none`: the handles are of another cluster then, and every volume would be listed.
pub fn orphans(controller: &Controller, handles: &HashSet<String>, may_be_none: bool) -> Result<Vec<Orphan>> {
    let is_own = |handle: &String| {
        let id = VolumeId::parse(handle);
        id.is_some_and(|id| controller.backends.iter().any(|backend| backend.name == id.backend))
    };
    if !may_be_none && !handles.iter().any(is_own) {
        return Err(Fault::invalid(format!(
            "none of {} handles is BACKEND/UUID with a backend of --backends: --allow-none lists all volumes",
            handles.len()
        )));
    }
    let all = controller.all_volumes()?.into_iter();
    let orphans = all.filter(|(id, _)| !handles.contains(&id.to_string()));
    Ok(orphans.map(|(id, volume)| Orphan { id, volume }).collect())
}

/// Deletes an orphan as DeleteVolume does: never one that a host has access to.
///
/// # Errors
/// As DeleteVolume.
pub fn delete(controller: &Controller, orphan: &Orphan) -> Result<()> {
    let request = DeleteVolumeRequest { volume_id: orphan.id.to_string(), ..DeleteVolumeRequest::default() };
    controller.delete_volume(&request)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handles_are_the_first_words_of_lines() {
        let found = handles("rack1/a\n\n  rack1/b\t100\tname\n");
        assert_eq!(found, HashSet::from(["rack1/a".to_owned(), "rack1/b".to_owned()]));
    }
}

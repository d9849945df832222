//! Internal snapshots of devices that are qcow2 images, made and deleted while exports serve them.

use super::Engine;
use crate::api_error::{ApiError, Kind};
use api::ImageSnapshot;
use stack::kinds::qcow2::{Error, LiveImage, Problem, Snapshot};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

impl Engine {
    /// The internal snapshots of a device, the oldest first.
    ///
    /// # Errors
    /// When there is no such device, it is no image that is written, or the image cannot be read.
    pub fn image_snapshots(&self, name: &str) -> Result<Vec<ImageSnapshot>, ApiError> {
        let known = self.image(name)?.snapshots().map_err(failed)?;
        Ok(known.iter().map(report).collect())
    }

    /// Makes an internal snapshot of a device. Writes of its clients wait meanwhile.
    ///
    /// # Errors
    /// As [`Engine::image_snapshots`]; when the image cannot have it.
    pub fn create_image_snapshot(&self, name: &str, snapshot: &str) -> Result<ImageSnapshot, ApiError> {
        let image = self.image(name)?;
        // A clock before 1970 has no date in an image.
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let id = image.create_snapshot(snapshot, now).map_err(failed)?;
        self.events.emit("device", name, "snapshot-created", snapshot);
        let found = image.snapshots().map_err(failed)?.into_iter().find(|known| known.id == id);
        found.as_ref().map(report).ok_or_else(|| ApiError::not_found("snapshot", snapshot))
    }

    /// Deletes an internal snapshot of a device, which is named by identifier or name. Writes of
    /// the device's clients wait meanwhile.
    ///
    /// # Errors
    /// As [`Engine::image_snapshots`]; when there is no such snapshot.
    pub fn delete_image_snapshot(&self, name: &str, snapshot: &str) -> Result<(), ApiError> {
        let image = self.image(name)?;
        let known = image.snapshots().map_err(failed)?;
        if !known.iter().any(|known| known.id == snapshot || known.name == snapshot) {
            return Err(ApiError::not_found("snapshot", snapshot));
        }
        image.delete_snapshot(snapshot).map_err(failed)?;
        self.events.emit("device", name, "snapshot-deleted", snapshot);
        Ok(())
    }

    /// The image of a device.
    pub(super) fn image(&self, name: &str) -> Result<Arc<LiveImage>, ApiError> {
        self.device(name)?;
        let live = self.live();
        let image = live.base(name)?.image.clone();
        image.ok_or_else(|| ApiError::invalid(format!("device {name}: no qcow2 image that is written")))
    }
}

fn report(snapshot: &Snapshot) -> ImageSnapshot {
    ImageSnapshot {
        id: snapshot.id.clone(),
        name: snapshot.name.clone(),
        created_at_ns: u64::from(snapshot.seconds) * 1_000_000_000 + u64::from(snapshot.nanoseconds),
        size_bytes: snapshot.size,
    }
}

pub(super) fn failed(error: Error) -> ApiError {
    let kind = match error.problem {
        Problem::Refused(_) => Kind::Invalid,
        _ => Kind::Failed,
    };
    ApiError::new(kind, error.to_string())
}

//! Maps each vhost-user message to one operation of the [`Session`].
//!
//! The `vhost` crate checks sizes, flags and file counts before it calls a method, and that the
//! protocol feature of a message was negotiated. It checks no index, address or length. An error
//! ends the connection.

use super::descriptors::{event, memory};
use super::features;
use super::rings::{Addresses, Kick};
use super::session::Session;
use crate::virtio_blk::config;
use exports::Error;
use std::fs::File;
use std::os::fd::AsFd;
use vhost::vhost_user::message::{
    VhostTransferStateDirection, VhostTransferStatePhase, VhostUserConfigFlags, VhostUserInflight,
    VhostUserLog, VhostUserMemoryRegion, VhostUserProtocolFeatures, VhostUserShMemConfig, VhostUserSharedMsg,
    VhostUserSingleMemoryRegion, VhostUserVringAddrFlags, VhostUserVringState,
};
use vhost::vhost_user::{
    Backend, Error as ProtocolError, GpuBackend, Result as ProtocolResult, VhostUserBackendReqHandlerMut,
};
use virtio::dirty_log::DirtyLog;
use virtio::inflight::InflightRegion;
use virtio::memory::{GuestMemory, MAX_REGIONS, RegionSpec};

/// The result of `set_mem_table` and `add_mem_region`: nothing, without postcopy.
type NoBases<T> = ProtocolResult<Option<T>>;

impl VhostUserBackendReqHandlerMut for Session {
    fn set_owner(&mut self) -> ProtocolResult<()> {
        Ok(())
    }

    fn reset_owner(&mut self) -> ProtocolResult<()> {
        self.reset_rings();
        Ok(())
    }

    fn reset_device(&mut self) -> ProtocolResult<()> {
        self.reset_rings();
        Ok(())
    }

    fn get_features(&mut self) -> ProtocolResult<u64> {
        Ok(self.offered_features())
    }

    fn set_features(&mut self, features: u64) -> ProtocolResult<()> {
        Ok(Session::set_features(self, features)?)
    }

    fn get_protocol_features(&mut self) -> ProtocolResult<VhostUserProtocolFeatures> {
        Ok(features::protocol_features())
    }

    fn set_protocol_features(&mut self, features: u64) -> ProtocolResult<()> {
        Ok(Session::set_protocol_features(self, features)?)
    }

    fn get_queue_num(&mut self) -> ProtocolResult<u64> {
        Ok(self.config().num_queues.into())
    }

    fn set_mem_table(
        &mut self,
        regions: &[VhostUserMemoryRegion],
        files: Vec<File>,
        _postcopy: Option<bool>,
    ) -> NoBases<Vec<u64>> {
        let specs = regions.iter().zip(files).map(|(region, file)| self.spec(region, file));
        // Every file is checked before the first error returns: refused ones must be closed by
        // another thread.
        let specs: Vec<Result<RegionSpec, Error>> = specs.collect();
        let specs = specs.into_iter().collect::<Result<_, _>>()?;
        let memory = GuestMemory::map(specs).map_err(|error| Error::client("memory table refused", error))?;
        self.change_memory(memory)?;
        Ok(None)
    }

    fn get_max_mem_slots(&mut self) -> ProtocolResult<u64> {
        Ok(MAX_REGIONS as u64)
    }

    fn add_mem_region(
        &mut self,
        region: &VhostUserSingleMemoryRegion,
        file: File,
        _postcopy: Option<bool>,
    ) -> NoBases<u64> {
        let memory = self.memory().with_added(self.spec(region, file)?);
        let memory = memory.map_err(|error| Error::client("memory region refused", error))?;
        self.change_memory(memory)?;
        Ok(None)
    }

    fn remove_mem_region(&mut self, region: &VhostUserSingleMemoryRegion) -> ProtocolResult<()> {
        let memory = self.memory().without(region.guest_phys_addr, region.user_addr, region.memory_size);
        let memory = memory.map_err(|error| Error::client("memory region not removed", error))?;
        Ok(self.change_memory(memory)?)
    }

    fn set_vring_num(&mut self, index: u32, num: u32) -> ProtocolResult<()> {
        let is_packed = self.is_packed();
        Ok(self.change_ring(index, |ring| ring.set_size(num, is_packed))?)
    }

    fn set_vring_addr(
        &mut self,
        index: u32,
        flags: VhostUserVringAddrFlags,
        descriptors: u64,
        used: u64,
        available: u64,
        log: u64,
    ) -> ProtocolResult<()> {
        let used_log = flags.contains(VhostUserVringAddrFlags::VHOST_VRING_F_LOG).then_some(log);
        let addresses = Addresses { descriptors, available, used, used_log };
        Ok(self.change_ring(index, |ring| {
            ring.addresses = Some(addresses);
            Ok(())
        })?)
    }

    fn set_vring_base(&mut self, index: u32, base: u32) -> ProtocolResult<()> {
        Ok(self.change_ring(index, |ring| {
            ring.base = base;
            Ok(())
        })?)
    }

    fn get_vring_base(&mut self, index: u32) -> ProtocolResult<VhostUserVringState> {
        Ok(VhostUserVringState::new(index, self.stop_ring(index)?))
    }

    fn set_vring_kick(&mut self, index: u8, file: Option<File>) -> ProtocolResult<()> {
        let kick = match event(index, "kick", file)? {
            Some(fd) => Kick::Event(fd),
            None => Kick::Polled,
        };
        Ok(self.change_ring(index.into(), |ring| {
            ring.kick = Some(kick);
            Ok(())
        })?)
    }

    fn set_vring_call(&mut self, index: u8, file: Option<File>) -> ProtocolResult<()> {
        let call = event(index, "call", file)?;
        Ok(self.set_call(index.into(), call)?)
    }

    fn set_vring_err(&mut self, index: u8, file: Option<File>) -> ProtocolResult<()> {
        let err = event(index, "error", file)?;
        Ok(self.change_ring(index.into(), |ring| {
            ring.err = err;
            Ok(())
        })?)
    }

    fn set_vring_enable(&mut self, index: u32, enable: bool) -> ProtocolResult<()> {
        if self.ring(index)?.is_enabled == enable {
            return Ok(());
        }
        Ok(self.change_ring(index, |ring| {
            ring.is_enabled = enable;
            Ok(())
        })?)
    }

    fn get_config(&mut self, offset: u32, size: u32, _: VhostUserConfigFlags) -> ProtocolResult<Vec<u8>> {
        config::read_space(&self.config_space(), offset, size).ok_or(ProtocolError::InvalidParam)
    }

    fn set_config(&mut self, offset: u32, bytes: &[u8], _: VhostUserConfigFlags) -> ProtocolResult<()> {
        Ok(self.write_config(offset, bytes)?)
    }

    fn set_backend_req_fd(&mut self, _: Backend) {
        // The control thread has kept the socket: see `config_change`.
    }

    fn get_inflight_fd(&mut self, wanted: &VhostUserInflight) -> ProtocolResult<(VhostUserInflight, File)> {
        let (queues, size) = self.check_inflight(wanted)?;
        let region = InflightRegion::create(queues, size, self.is_packed())
            .map_err(|source| Error::System { action: "create the in-flight region", source })?;
        let file = region.fd().try_clone_to_owned();
        let file = file.map_err(|source| Error::System { action: "share the in-flight region", source })?;
        let len = InflightRegion::size(queues, size, self.is_packed());
        let answer = VhostUserInflight::new(len, 0, queues, size);
        Ok((answer, File::from(file)))
    }

    fn set_inflight_fd(&mut self, given: &VhostUserInflight, file: File) -> ProtocolResult<()> {
        let file = memory("in-flight region", file, self.config().memory)?;
        let (queues, size) = self.check_inflight(given)?;
        let region = InflightRegion::map(
            file.into(),
            given.mmap_offset,
            given.mmap_size,
            queues,
            size,
            self.is_packed(),
        )
        .map_err(|error| Error::client("in-flight region refused", error))?;
        Ok(self.set_inflight(region)?)
    }

    fn set_log_base(&mut self, log: &VhostUserLog, file: File) -> ProtocolResult<()> {
        let file = memory("dirty log", file, self.config().memory)?;
        let log = DirtyLog::map(file.as_fd(), log.mmap_offset, log.mmap_size)
            .map_err(|error| Error::client("dirty log refused", error))?;
        Ok(self.set_log(log)?)
    }

    fn set_gpu_socket(&mut self, _: GpuBackend) -> ProtocolResult<()> {
        Err(ProtocolError::InvalidOperation("the device has no display"))
    }

    fn get_shared_object(&mut self, _: VhostUserSharedMsg) -> ProtocolResult<File> {
        Err(ProtocolError::InvalidOperation("the device has no shared objects"))
    }

    fn set_device_state_fd(
        &mut self,
        _: VhostTransferStateDirection,
        _: VhostTransferStatePhase,
        _: File,
    ) -> ProtocolResult<Option<File>> {
        Err(ProtocolError::InvalidOperation("the device has no state beyond its rings"))
    }

    fn check_device_state(&mut self) -> ProtocolResult<()> {
        Err(ProtocolError::InvalidOperation("the device has no state beyond its rings"))
    }

    fn get_shmem_config(&mut self) -> ProtocolResult<VhostUserShMemConfig> {
        Err(ProtocolError::InvalidOperation("the device has no shared memory regions"))
    }
}

impl Session {
    fn check_inflight(&self, wanted: &VhostUserInflight) -> Result<(u16, u16), Error> {
        let VhostUserInflight { num_queues, queue_size, .. } = *wanted;
        if num_queues > self.config().num_queues || queue_size > super::MAX_QUEUE_SIZE {
            let text = format!("in-flight region for {num_queues} queues of {queue_size}");
            return Err(Error::protocol(text));
        }
        Ok((num_queues, queue_size))
    }

    fn spec(&self, region: &VhostUserMemoryRegion, file: File) -> Result<RegionSpec, Error> {
        let (guest_addr, len) = (region.guest_phys_addr, region.memory_size);
        let what = format!("memory region at {guest_addr:#x} of {len} bytes");
        let file = memory(&what, file, self.config().memory)?;
        Ok(RegionSpec {
            guest_addr,
            len,
            user_addr: region.user_addr,
            fd: file.into(),
            fd_offset: region.mmap_offset,
        })
    }
}

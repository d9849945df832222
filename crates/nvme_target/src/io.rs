//! Commands of I/O queues: the NVM command set.
//!
//! Source: NVM Command Set Specification 1.0, 3.2; Base Specification 2.0, 7.

use crate::controller::Controller;
use crate::failure::Failure;
use crate::queue::{Queue, Reply, room};
use crate::reservations::{self, Change, Gate, Running};
use crate::subsystem::Namespace;
use crate::transport::{Command, Transport};
use crate::{MAX_TRANSFER, PART};
use block::{Flags, Op};
use exports::{DataMemory, Target};
use nvme::command::{BlockRange, dataset_management, opcode, parse_deallocate_range};
use nvme::fabrics::{self, FabricsType};
use nvme::reservation::{Acquire, KEY_BYTES, KEYS_BYTES, Register, Release, Report};
use nvme::{MAX_RANGES, Status, SubmissionEntry};

/// Bytes of one range of a dataset management command.
const RANGE_BYTES: usize = 16;

/// The target of a command.
pub(crate) struct Place<'a> {
    pub(crate) namespace: &'a Namespace,
    pub(crate) target: &'a Target,
    gate: &'a Gate,
    controller: &'a Controller,
}

/// A byte range of a namespace.
#[derive(Clone, Copy)]
pub(crate) struct Bytes {
    pub(crate) offset: u64,
    pub(crate) len: u64,
}

impl Bytes {
    pub(crate) fn overlaps(&self, other: &Bytes) -> bool {
        self.offset < other.offset + other.len && other.offset < self.offset + self.len
    }
}

impl Place<'_> {
    /// The bytes of `blocks` blocks from `lba` on.
    #[inline]
    pub(crate) fn bytes(&self, lba: u64, blocks: u32) -> Result<Bytes, Status> {
        let shift = self.namespace.block_shift();
        let end = lba.checked_add(blocks.into()).filter(|end| *end <= self.namespace.capacity() >> shift);
        end.ok_or(Status::LBA_OUT_OF_RANGE)?;
        Ok(Bytes { offset: lba << shift, len: u64::from(blocks) << shift })
    }

    /// Checks that no reservation forbids a read.
    #[inline]
    pub(crate) fn admit_read(&self) -> Result<(), Status> {
        self.controller.check_read(self.namespace.id)
    }

    /// As [`Place::admit_read`], for a write: now, and until the result is dropped.
    #[inline]
    pub(crate) fn admit_write(&self) -> Result<Running, Status> {
        self.controller.check_write(self.namespace.id)?;
        Ok(self.gate.pass())
    }

    #[inline]
    fn range(&self, range: &BlockRange) -> Result<Bytes, Status> {
        self.bytes(range.lba, range.blocks)
    }
}

impl Queue {
    /// Executes a command of an I/O queue.
    #[inline]
    pub(crate) async fn io<T: Transport>(
        &self,
        mut command: Command<T::Memory>,
        transport: &T,
    ) -> Result<Reply<T::Memory>, Failure> {
        let entry = command.entry;
        entry.check_not_fused()?;
        if entry.opcode != fabrics::OPCODE {
            self.controller().port.check_access()?;
        }
        match entry.opcode {
            opcode::READ => return self.read(&entry, transport).await,
            opcode::WRITE => self.write(&mut command, transport).await?,
            opcode::FLUSH => self.flush(&entry, transport).await?,
            opcode::WRITE_ZEROES => self.write_zeroes(&entry, transport).await?,
            opcode::DATASET_MANAGEMENT => self.manage_dataset(&mut command, transport).await?,
            opcode::COPY => self.copy(&mut command, transport).await?,
            opcode::COMPARE => self.compare(&mut command, transport).await?,
            opcode::VERIFY => self.verify(&entry, transport).await?,
            opcode::RESERVATION_REPORT
            | opcode::RESERVATION_REGISTER
            | opcode::RESERVATION_ACQUIRE
            | opcode::RESERVATION_RELEASE
                if !self.controller().subsystem.has_reservations() =>
            {
                return Err(Status::INVALID_OPCODE.into());
            }
            opcode::RESERVATION_REPORT => return self.report(&entry, transport).await,
            opcode::RESERVATION_REGISTER | opcode::RESERVATION_ACQUIRE | opcode::RESERVATION_RELEASE => {
                self.reserve(&mut command, transport).await?;
            }
            fabrics::OPCODE => match FabricsType::of(&entry) {
                // The host closes the connection after the completion.
                Some(FabricsType::Disconnect) => {}
                Some(FabricsType::Connect) => return Err(Status::COMMAND_SEQUENCE_ERROR.into()),
                _ => return Err(Status::INVALID_FIELD.into()),
            },
            _ => return Err(Status::INVALID_OPCODE.into()),
        }
        Ok(Reply::default())
    }

    #[inline]
    pub(crate) fn place(&self, nsid: u32) -> Result<Place<'_>, Status> {
        let controller = self.controller();
        let namespace = controller.subsystem.namespace(nsid).ok_or(Status::INVALID_NAMESPACE)?;
        Ok(Place { namespace, target: &self.targets()[nsid as usize - 1], gate: self.gate(nsid), controller })
    }

    #[inline]
    async fn read<T: Transport>(
        &self,
        entry: &SubmissionEntry,
        transport: &T,
    ) -> Result<Reply<T::Memory>, Failure> {
        let place = self.place(entry.nsid)?;
        let Bytes { offset, len } = place.range(&BlockRange::parse(&entry.cdw))?;
        if len > MAX_TRANSFER.into() {
            return Err(Status::INVALID_FIELD.into());
        }
        if room(entry)? != len as usize {
            return Err(Status::INVALID_SGL_LENGTH.into());
        }
        let memory = transport.memory(len as usize).await;
        // Checked here, after all waits.
        if let Err(status) = place.admit_read() {
            drop(memory);
            return Err(status.into());
        }
        // SAFETY: the memory outlives the transfer, which is awaited here.
        let data = unsafe { memory.data() };
        let result = place.target.transfer(Op::Read, Flags::NONE, offset, data).await;
        transport.stats().count_request(Op::Read, len);
        match result {
            Ok(()) => Ok(Reply { data: Some(memory), ..Reply::default() }),
            Err(error) => {
                drop(memory);
                Err(error.into())
            }
        }
    }

    #[inline]
    async fn write<T: Transport>(
        &self,
        command: &mut Command<T::Memory>,
        transport: &T,
    ) -> Result<(), Failure> {
        let entry = command.entry;
        let place = self.place(entry.nsid)?;
        let range = BlockRange::parse(&entry.cdw);
        let Bytes { offset, len } = place.range(&range)?;
        place.admit_write()?; // before its data is requested
        let incoming = self.incoming(command, len as usize, transport).await?;
        let running = match place.admit_write() {
            Ok(running) => running,
            Err(status) => {
                drop(incoming);
                return Err(status.into());
            }
        };
        let flags = if range.fua { place.target.durable() } else { Flags::NONE };
        // SAFETY: the memory outlives the transfer, which is awaited here.
        let data = unsafe { incoming.data() };
        let result = place.target.transfer(Op::Write, flags, offset, data).await;
        drop(running);
        transport.stats().count_request(Op::Write, len);
        drop(incoming);
        Ok(result?)
    }

    async fn flush<T: Transport>(&self, entry: &SubmissionEntry, transport: &T) -> Result<(), Failure> {
        for nsid in self.meant(entry.nsid)? {
            let place = self.place(nsid)?;
            place.controller.check_write(nsid)?; // as the specification demands
            place.target.flush().await?;
        }
        transport.stats().count_request(Op::Flush, 0);
        Ok(())
    }

    async fn write_zeroes<T: Transport>(
        &self,
        entry: &SubmissionEntry,
        transport: &T,
    ) -> Result<(), Failure> {
        let place = self.place(entry.nsid)?;
        let range = BlockRange::parse(&entry.cdw);
        let Bytes { offset, len } = place.range(&range)?;
        let durable = if range.fua { place.target.durable() } else { Flags::NONE };
        let flags = if range.deallocate { durable } else { durable.with(Flags::NO_UNMAP) };
        let _running = place.admit_write()?;
        transport.stats().count_request(Op::WriteZeroes, len);
        Ok(place.target.write_zeroes(offset, len, flags).await?)
    }

    async fn manage_dataset<T: Transport>(
        &self,
        command: &mut Command<T::Memory>,
        transport: &T,
    ) -> Result<(), Failure> {
        let entry = command.entry;
        let place = self.place(entry.nsid)?;
        let (ranges, deallocates) = dataset_management(&entry.cdw);
        let len = ranges as usize * RANGE_BYTES;
        // Linux sends a buffer for the maximum number of ranges.
        let sent = entry.sgl.len() as usize;
        if !(len..=MAX_RANGES as usize * RANGE_BYTES).contains(&sent) {
            return Err(Status::INVALID_SGL_LENGTH.into());
        }
        place.admit_write()?;
        let mut incoming = self.incoming(command, sent, transport).await?;
        let mut list = Vec::with_capacity(MAX_RANGES as usize * RANGE_BYTES);
        incoming.look(0, len, |piece| list.extend_from_slice(piece));
        drop(incoming);
        // All other attributes are hints, and so is deallocate on a device without discard.
        if !deallocates || place.namespace.limits.max_discard == 0 {
            return Ok(());
        }
        let (list, _) = list.as_chunks::<RANGE_BYTES>();
        let ranges: Vec<Bytes> = list
            .iter()
            .map(parse_deallocate_range)
            .map(|(lba, blocks)| place.bytes(lba, blocks))
            .collect::<Result<_, _>>()?;
        let _running = place.admit_write()?;
        for Bytes { offset, len } in ranges.into_iter().filter(|range| range.len > 0) {
            transport.stats().count_request(Op::Discard, len);
            place.target.discard(offset, len).await?;
        }
        Ok(())
    }

    async fn compare<T: Transport>(
        &self,
        command: &mut Command<T::Memory>,
        transport: &T,
    ) -> Result<(), Failure> {
        let entry = command.entry;
        let place = self.place(entry.nsid)?;
        let bytes = place.range(&BlockRange::parse(&entry.cdw))?;
        let mut incoming = self.incoming(command, bytes.len as usize, transport).await?;
        let mut expected = Vec::with_capacity(PART);
        let result = self
            .in_parts(&place, bytes, transport, |at, found| {
                expected.clear();
                incoming.look(at, found.len(), |piece| expected.extend_from_slice(piece));
                if expected == found { Ok(()) } else { Err(Status::COMPARE_FAILURE) }
            })
            .await;
        drop(incoming);
        result
    }

    async fn verify<T: Transport>(&self, entry: &SubmissionEntry, transport: &T) -> Result<(), Failure> {
        let place = self.place(entry.nsid)?;
        let bytes = place.range(&BlockRange::parse(&entry.cdw))?;
        self.in_parts(&place, bytes, transport, |_, _| Ok(())).await
    }

    /// Reads part by part and passes each to `check`, with its offset in the whole.
    async fn in_parts<T: Transport>(
        &self,
        place: &Place<'_>,
        Bytes { offset, len }: Bytes,
        transport: &T,
        mut check: impl FnMut(usize, &[u8]) -> Result<(), Status>,
    ) -> Result<(), Failure> {
        place.admit_read()?;
        transport.stats().count_request(Op::Read, len);
        // At most one command of the queue at a time: there is memory for one part.
        let _turn = transport.scratch().await;
        let mut bytes = Vec::with_capacity(PART);
        for at in (0..len as usize).step_by(PART) {
            let part = PART.min(len as usize - at);
            let mut memory = transport.uncounted(part);
            // SAFETY: the memory outlives the transfer, which is awaited here.
            let data = unsafe { memory.data() };
            place.target.transfer(Op::Read, Flags::NONE, offset + at as u64, data).await?;
            bytes.clear();
            memory.look(0, part, |piece| bytes.extend_from_slice(piece));
            check(at, &bytes)?;
        }
        Ok(())
    }

    /// Executes a reservation command.
    async fn reserve<T: Transport>(
        &self,
        command: &mut Command<T::Memory>,
        transport: &T,
    ) -> Result<(), Failure> {
        let entry = command.entry;
        let len = if entry.opcode == opcode::RESERVATION_RELEASE { KEY_BYTES } else { KEYS_BYTES };
        // Some versions of Linux send two keys with a release.
        let sent = entry.sgl.len() as usize;
        if !(len..=KEYS_BYTES).contains(&sent) {
            return Err(Status::INVALID_SGL_LENGTH.into());
        }
        let mut incoming = self.incoming(command, sent, transport).await?;
        let mut keys = [0; KEYS_BYTES];
        incoming.copy_to(&mut keys[..len]);
        drop(incoming);
        let change = match entry.opcode {
            opcode::RESERVATION_REGISTER => Register::parse(&entry.cdw, &keys).map(Change::Register),
            opcode::RESERVATION_ACQUIRE => Acquire::parse(&entry.cdw, &keys).map(Change::Acquire),
            _ => keys.first_chunk().and_then(|key| Release::parse(&entry.cdw, key)).map(Change::Release),
        };
        let change = change.ok_or(Status::INVALID_FIELD)?;
        Ok(reservations::change(self.controller(), entry.nsid, change).await?)
    }

    async fn report<T: Transport>(
        &self,
        entry: &SubmissionEntry,
        transport: &T,
    ) -> Result<Reply<T::Memory>, Failure> {
        let namespace = self.place(entry.nsid)?.namespace;
        let (len, is_extended) = Report::parse_command(&entry.cdw);
        if !is_extended {
            return Err(Status::INCONSISTENT_HOST_ID.into());
        }
        if len > MAX_TRANSFER.into() {
            return Err(Status::INVALID_FIELD.into());
        }
        let mut report = namespace.reserved.report(&self.controller().subsystem).encode();
        report.resize(len as usize, 0);
        self.reply_with(entry, &report, transport).await
    }
}

//! A file with a volatile cache: a power loss loses some writes that no flush has made durable.

use crate::over::over;
use block::{Channel, Device, IoFuture, Op, Request, StatusReport};
use std::collections::HashSet;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::rc::Rc;
use std::sync::{Arc, Mutex};

const SECTOR: usize = 512;

/// The offset of a write, and the bytes that it has replaced.
type Write = (u64, Vec<u8>);

/// The bytes that writes have replaced since the last flush, in their order.
#[derive(Clone)]
pub struct Replaced {
    file: Arc<File>,
    list: Arc<Mutex<Vec<Write>>>,
}

impl Replaced {
    pub fn new(path: &Path) -> Replaced {
        let file = File::options().read(true).write(true).open(path).unwrap();
        Replaced { file: Arc::new(file), list: Arc::default() }
    }

    fn note(&self, offset: u64, len: u64) {
        let mut bytes = vec![0; len as usize];
        let inside = self.file.metadata().unwrap().len().saturating_sub(offset).min(len);
        self.file.read_exact_at(&mut bytes[..inside as usize], offset).unwrap();
        self.list.lock().unwrap().push((offset, bytes));
    }

    /// Loses power: each sector that was written since the last flush has one of its contents.
    /// `is_kept` decides for each write, which it gets by its number from the last one on.
    pub fn lose(&self, mut is_kept: impl FnMut(usize) -> bool) {
        let mut kept = HashSet::new();
        for (number, (offset, bytes)) in self.list.lock().unwrap().drain(..).rev().enumerate() {
            for (at, old) in (offset..).step_by(SECTOR).zip(bytes.chunks(SECTOR)) {
                if kept.contains(&at) || is_kept(number) {
                    kept.insert(at);
                } else {
                    self.file.write_all_at(old, at).unwrap();
                }
            }
        }
    }
}

/// The device over the file of `replaced`, with its cache.
pub fn losing(child: Arc<dyn Device>, replaced: Replaced) -> Arc<dyn Device> {
    over(child, false, move |channel| Rc::new(LosingChannel(channel, replaced.clone())))
}

struct LosingChannel(Rc<dyn Channel>, Replaced);

impl Channel for LosingChannel {
    fn submit<'a>(&'a self, req: &'a Request<'a>, offset: u64) -> IoFuture<'a> {
        match req.op {
            Op::Read => self.0.submit(req, offset),
            Op::Flush => IoFuture::new(async move {
                let flushed = self.0.submit(req, offset).await;
                if flushed.is_ok() {
                    self.1.list.lock().unwrap().clear();
                }
                flushed
            }),
            _ => {
                if !req.is_fua() {
                    self.1.note(offset, req.len);
                }
                self.0.submit(req, offset)
            }
        }
    }

    fn block_status<'a>(&'a self, report: &'a StatusReport, offset: u64, len: u64) -> IoFuture<'a> {
        self.0.block_status(report, offset, len)
    }
}

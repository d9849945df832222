//! Decompression of one cluster, bounded by its size. The core serves others between the steps.
//!
//! Source: QEMU `docs/interop/qcow2.rst`, section *Compressed Clusters Descriptor*, and the field
//! `compression_type`.

use crate::header::Compression;
use block::IoError;
use flate2::{Compress, Decompress, FlushCompress, FlushDecompress, Status};
use std::io;
use zstd::stream::raw::{DParameter, Decoder, InBuffer, Operation, OutBuffer};

/// Bytes to decompress before the core serves others: about 0.1 ms.
const STEP: usize = 64 << 10;
/// Largest window of zstd as a power of two, which bounds the decoder's memory. RFC 8878
/// (3.1.1.1.2) recommends that decoders support 8 MiB; QEMU writes at most a cluster.
const ZSTD_WINDOW_BITS: u32 = 23;

/// The window that QEMU's readers of deflate have (`block/qcow2-threads.c`).
const DEFLATE_WINDOW_BITS: u8 = 12;
/// The level of zstd that is its default, as in QEMU.
const ZSTD_LEVEL: i32 = 3;

/// Decompresses `data` until a cluster of `len` bytes is full. Bytes of `data` behind it
/// are ignored: the length is known in sectors only.
///
/// # Errors
/// [`IoError::Corrupt`] when the data is damaged or ends before the cluster is full.
pub async fn decompress(kind: Compression, data: &[u8], len: usize) -> Result<Box<[u8]>, IoError> {
    let mut cluster = vec![0; len].into_boxed_slice();
    match kind {
        Compression::Zlib => inflate(data, &mut cluster).await?,
        Compression::Zstd => decompress_zstd(data, &mut cluster).await?,
    }
    Ok(cluster)
}

/// Compresses a cluster. The result may be longer than it.
///
/// # Errors
/// When the compressor lacks memory.
pub(crate) fn compress(kind: Compression, cluster: &[u8]) -> io::Result<Vec<u8>> {
    match kind {
        Compression::Zlib => {
            let level = flate2::Compression::default();
            let mut encoder = Compress::new_with_window_bits(level, false, DEFLATE_WINDOW_BITS);
            // As long as a stored cluster may become: 5 bytes for each block of it, and an end.
            let mut packed = Vec::with_capacity(cluster.len() + cluster.len() / 1024 + 64);
            match encoder.compress_vec(cluster, &mut packed, FlushCompress::Finish) {
                Ok(Status::StreamEnd) => Ok(packed),
                _ => Ok(cluster.to_vec()),
            }
        }
        Compression::Zstd => zstd::bulk::compress(cluster, ZSTD_LEVEL),
    }
}

async fn inflate(data: &[u8], cluster: &mut [u8]) -> Result<(), IoError> {
    let mut decoder = Decompress::new(false);
    let mut done = 0;
    while done < cluster.len() {
        let (used, end) = (decoder.total_in() as usize, (done + STEP).min(cluster.len()));
        let status = decoder.decompress(&data[used..], &mut cluster[done..end], FlushDecompress::None);
        let written = decoder.total_out() as usize - done;
        done += written;
        match status {
            Ok(Status::StreamEnd) if done < cluster.len() => return Err(IoError::Corrupt),
            Ok(_) if written > 0 => {}
            _ => return Err(IoError::Corrupt),
        }
        yield_unless_full(done, cluster.len()).await;
    }
    Ok(())
}

async fn decompress_zstd(data: &[u8], cluster: &mut [u8]) -> Result<(), IoError> {
    let mut decoder = Decoder::new().map_err(|_| IoError::NoMemory)?;
    decoder.set_parameter(DParameter::WindowLogMax(ZSTD_WINDOW_BITS)).map_err(|_| IoError::NoMemory)?;
    let mut input = InBuffer::around(data);
    let mut done = 0;
    while done < cluster.len() {
        let end = (done + STEP).min(cluster.len());
        let used = input.pos();
        let mut output = OutBuffer::around(&mut cluster[done..end]);
        decoder.run(&mut input, &mut output).map_err(|_| IoError::Corrupt)?;
        let written = output.pos();
        done += written;
        // Without progress the data has ended. A call may also only read, e.g. the end of a frame.
        if written == 0 && input.pos() == used {
            return Err(IoError::Corrupt);
        }
        yield_unless_full(done, cluster.len()).await;
    }
    Ok(())
}

async fn yield_unless_full(done: usize, len: usize) {
    if done < len {
        reactor::yield_now().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    fn words(len: usize) -> Vec<u8> {
        (0..len as u32).map(|i| ((i / 7).wrapping_mul(i) % 251) as u8 >> 2).collect()
    }

    fn packed(kind: Compression, bytes: &[u8]) -> Vec<u8> {
        match kind {
            Compression::Zlib => {
                let mut encoder = flate2::write::DeflateEncoder::new(Vec::new(), flate2::Compression::fast());
                encoder.write_all(bytes).unwrap();
                encoder.finish().unwrap()
            }
            Compression::Zstd => zstd::bulk::compress(bytes, 3).unwrap(),
        }
    }

    fn unpacked(kind: Compression, data: Vec<u8>, len: usize) -> Result<Box<[u8]>, IoError> {
        reactor::run(async move { decompress(kind, &data, len).await })
    }

    #[test]
    fn a_cluster_is_decompressed_and_the_bytes_behind_it_are_ignored() {
        for kind in [Compression::Zlib, Compression::Zstd] {
            for len in [512, 4096, 200_000] {
                let bytes = words(len);
                let mut data = packed(kind, &bytes);
                assert_eq!(unpacked(kind, data.clone(), len).as_deref(), Ok(&bytes[..]));
                data.resize(data.len() + 511, 0xa5);
                assert_eq!(unpacked(kind, data, len).as_deref(), Ok(&bytes[..]));
            }
        }
    }

    #[test]
    fn more_than_a_cluster_is_cut_and_less_is_corrupt() {
        for kind in [Compression::Zlib, Compression::Zstd] {
            let bytes = words(100_000);
            let data = packed(kind, &bytes);
            assert_eq!(unpacked(kind, data.clone(), 65536).as_deref(), Ok(&bytes[..65536]));
            assert_eq!(unpacked(kind, data.clone(), 131_072), Err(IoError::Corrupt));
            assert_eq!(unpacked(kind, data[..data.len() / 2].to_vec(), 100_000), Err(IoError::Corrupt));
            assert_eq!(unpacked(kind, Vec::new(), 512), Err(IoError::Corrupt));
            assert_eq!(unpacked(kind, vec![0xff; 512], 512), Err(IoError::Corrupt));
        }
    }

    #[test]
    fn a_window_of_zstd_beyond_the_limit_is_refused() {
        // Magic, a frame without content size, a window of 2 GiB, and one raw block.
        let mut data = vec![0x28, 0xb5, 0x2f, 0xfd, 0, 21 << 3, 1, 16, 0];
        data.extend([7; 512]);
        assert_eq!(unpacked(Compression::Zstd, data.clone(), 512), Err(IoError::Corrupt));
        data[5] = 10 << 3;
        assert_eq!(unpacked(Compression::Zstd, data, 512).as_deref(), Ok(&[7; 512][..]));
    }
}

//! Order as a device sees it: what a driver needs between its ring and hardware beside the order among CPUs.
//!
//! A device that negotiated `VIRTIO_F_ORDER_PLATFORM` reads memory like hardware, outside what the CPUs' own fences
//! cover on some architectures. On x86-64 they cover it: memory and registers are written in program order, and
//! only a write followed by a read needs a fence. A device that is software is content with these, too.
//!
//! Source: virtio 1.3, 6.1 (ORDER_PLATFORM) and 2.7.13.3; Linux, Documentation/memory-barriers.txt (dma_wmb).

use std::sync::atomic::{Ordering, compiler_fence, fence};

/// What was written before is visible to a device before anything that is written afterwards, registers included.
#[inline]
pub fn write() {
    compiler_fence(Ordering::Release);
    #[cfg(target_arch = "aarch64")]
    // SAFETY: a barrier touches no memory and no register.
    unsafe {
        std::arch::asm!("dmb oshst", options(nostack, preserves_flags));
    }
    #[cfg(target_arch = "riscv64")]
    // SAFETY: as above.
    unsafe {
        std::arch::asm!("fence w, ow", options(nostack, preserves_flags));
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64", target_arch = "riscv64")))]
    fence(Ordering::SeqCst);
}

/// What is read afterwards was written by a device no earlier than what was read before.
#[inline]
pub fn read() {
    compiler_fence(Ordering::Acquire);
    #[cfg(target_arch = "aarch64")]
    // SAFETY: as in `write`.
    unsafe {
        std::arch::asm!("dmb oshld", options(nostack, preserves_flags));
    }
    #[cfg(target_arch = "riscv64")]
    // SAFETY: as above.
    unsafe {
        std::arch::asm!("fence r, r", options(nostack, preserves_flags));
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64", target_arch = "riscv64")))]
    fence(Ordering::SeqCst);
}

/// What was written before is visible to a device before anything is read afterwards.
#[inline]
pub fn full() {
    fence(Ordering::SeqCst);
    #[cfg(target_arch = "aarch64")]
    // SAFETY: as in `write`.
    unsafe {
        std::arch::asm!("dmb osh", options(nostack, preserves_flags));
    }
    #[cfg(target_arch = "riscv64")]
    // SAFETY: as above.
    unsafe {
        std::arch::asm!("fence rw, rw", options(nostack, preserves_flags));
    }
}

//! Memory order as a device sees it: barriers between a driver's ring and hardware, in addition to
//! the order among CPUs.
//!
//! A device that negotiated `VIRTIO_F_ORDER_PLATFORM` reads memory like hardware, outside the CPUs'
//! own fences on some architectures. On x86-64 those fences suffice: memory and registers are
//! written in program order, and only a write followed by a read needs a fence. The barriers are
//! also sufficient for a device in software.
//!
//! Source: virtio 1.3, 6.1 (ORDER_PLATFORM) and 2.7.13.3; Linux, Documentation/memory-barriers.txt
//! (dma_wmb).

use std::sync::atomic::{Ordering, compiler_fence, fence};

/// Makes earlier writes visible to a device before any later write, including registers.
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

/// Later reads return values that the device wrote no earlier than those of preceding reads.
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

/// Makes earlier writes visible to a device before any later read.
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

//! Cache maintenance by the processor.
#![allow(unsafe_code, reason = "cache-line instructions take addresses")]

use crate::driver::CACHE_LINE_BYTES;

/// Whether this build can flush cache lines from user space.
pub(crate) const SUPPORTED: bool = cfg!(target_arch = "x86_64");

/// Writes back and drops every cache line that one of `ranges` (start and end address) touches, between two full fences.
/// Ranges are ascending; a line shared by two neighbours is flushed once.
///
/// # Safety
/// Every address in `ranges` is mapped.
pub(crate) unsafe fn flush(ranges: impl Iterator<Item = (usize, usize)>) {
    let line = CACHE_LINE_BYTES as usize;
    let mut next = 0;
    fence();
    for (start, end) in ranges {
        let mut at = (start & !(line - 1)).max(next);
        while at < end {
            // SAFETY: the line contains a mapped address (caller), and lines do not cross pages.
            unsafe { flush_line(at) };
            at += line;
        }
        next = at.max(next);
    }
    fence();
}

#[cfg(target_arch = "x86_64")]
fn fence() {
    // SAFETY: SSE2 belongs to the x86-64 baseline.
    unsafe { std::arch::x86_64::_mm_mfence() };
}

#[cfg(target_arch = "x86_64")]
unsafe fn flush_line(address: usize) {
    if has_clflushopt() {
        // SAFETY: the instruction exists (just checked) and the line is mapped (caller); it changes no register or memory
        // that the compiler knows about, and the fences around the loop order it.
        unsafe { std::arch::asm!("clflushopt [{}]", in(reg) address, options(nostack, preserves_flags)) };
    } else {
        // SAFETY: SSE2 belongs to the x86-64 baseline; the line is mapped (caller).
        unsafe { std::arch::x86_64::_mm_clflush(address as *const u8) };
    }
}

/// Bit 23 of EBX of CPUID leaf 7.
#[cfg(target_arch = "x86_64")]
fn has_clflushopt() -> bool {
    static FOUND: std::sync::LazyLock<bool> = std::sync::LazyLock::new(|| {
        std::arch::x86_64::__cpuid(0).eax >= 7 && std::arch::x86_64::__cpuid_count(7, 0).ebx & (1 << 23) != 0
    });
    *FOUND
}

#[cfg(not(target_arch = "x86_64"))]
fn fence() {
    std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
}

/// Never reached: [`SUPPORTED`] is false and the driver refuses to open.
#[cfg(not(target_arch = "x86_64"))]
unsafe fn flush_line(_address: usize) {}

#[cfg(test)]
mod tests {
    use super::flush;

    #[test]
    fn flushing_keeps_the_contents() {
        let data: Vec<u8> = (0..1000_u32).map(|i| i as u8).collect();
        let start = data.as_ptr() as usize;
        // SAFETY: all ranges lie inside `data`.
        unsafe { flush([(start, start + 3), (start + 3, start + 70), (start + 900, start + 1000)].into_iter()) };
        assert!(data.iter().enumerate().all(|(i, byte)| *byte == i as u8));
    }
}

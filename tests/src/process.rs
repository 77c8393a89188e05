//! What the kernel says of a process's memory.

/// Resident memory of a process, in bytes; `None` where it has ended.
#[must_use]
pub fn resident_bytes(process: u32) -> Option<u64> {
    status_bytes(process, "VmRSS:")
}

/// Largest size of a process's address space so far, in bytes, which counts reservations that were never touched; `None` where
/// the process has ended.
#[must_use]
pub fn peak_address_space_bytes(process: u32) -> Option<u64> {
    status_bytes(process, "VmPeak:")
}

fn status_bytes(process: u32, field: &str) -> Option<u64> {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    let kib = status.lines().find_map(|line| line.strip_prefix(field))?.split_whitespace().next()?;
    Some(kib.parse::<u64>().ok()? << 10)
}

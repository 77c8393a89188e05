//! Bounds-checked little-endian access.

/// Two bytes at `at`, if they exist.
pub(crate) fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes(array_at(bytes, at)?))
}

/// The little-endian word at byte `at`, if it lies inside.
#[must_use]
pub fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(array_at(bytes, at)?))
}

/// Eight bytes at `at`, if they exist.
pub(crate) fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(array_at(bytes, at)?))
}

/// `N` bytes at `at`, if they exist.
pub(crate) fn array_at<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..at.checked_add(N)?)?.try_into().ok()
}

/// `len` bytes at `at`, if they exist.
pub(crate) fn slice_at(bytes: &[u8], at: u64, len: u64) -> Option<&[u8]> {
    let start = usize::try_from(at).ok()?;
    let end = usize::try_from(at.checked_add(len)?).ok()?;
    bytes.get(start..end)
}

/// `value` rounded up to a multiple of `align` (0 and 1 mean no alignment), unless that overflows.
pub(crate) fn align_up(value: usize, align: usize) -> Option<usize> {
    if align <= 1 {
        return Some(value);
    }
    value.checked_next_multiple_of(align)
}

/// Pads `out` with zeros to a multiple of `align`.
pub(crate) fn pad_to(out: &mut Vec<u8>, align: usize) {
    out.resize(out.len().next_multiple_of(align), 0);
}

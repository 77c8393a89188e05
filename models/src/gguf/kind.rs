//! What a file is by its first bytes, for messages about files that are not GGUF.

/// Magic of a little-endian GGUF file.
pub(super) const MAGIC: [u8; 4] = *b"GGUF";

/// Names the format a file's first bytes point at.
pub(super) fn describe(head: &[u8]) -> String {
    let known: &[(&[u8], &str)] = &[
        (b"FUGG", "a byte-swapped (big-endian) GGUF file"),
        (b"lmgg", "a GGML file from before GGUF; convert it to GGUF"),
        (b"fmgg", "a GGMF file from before GGUF; convert it to GGUF"),
        (b"tjgg", "a GGJT file from before GGUF; convert it to GGUF"),
        (b"algg", "a GGLA adapter file from before GGUF"),
        (b"PK\x03\x04", "a ZIP archive (a Python wheel or a PyTorch checkpoint)"),
        (b"version https://git-lfs", "a Git LFS pointer: the model itself was not downloaded (git lfs pull)"),
        (b"\x1f\x8b", "gzip-compressed data"),
        (b"\x28\xb5\x2f\xfd", "Zstandard-compressed data"),
        (b"\xfd7zXZ\0", "xz-compressed data"),
        (b"7z\xbc\xaf", "a 7-Zip archive"),
        (b"\x7fELF", "an ELF file"),
        (b"\x89HDF", "an HDF5 file"),
        (b"\x80\x02", "a Python pickle"),
        (b"xclbin2\0", "an xclbin"),
    ];
    if let Some((_, what)) = known.iter().find(|(magic, _)| head.starts_with(magic)) {
        return (*what).to_owned();
    }
    // Before the texts: its length prefix may look like the start of one.
    if head.get(8..10) == Some(b"{\"") || head.get(8..10) == Some(b"{ ") {
        return "a safetensors file".to_owned();
    }
    let text = head.trim_ascii_start();
    if text.get(..1) == Some(b"<") {
        return "an HTML or XML page (an error page saved by a download?)".to_owned();
    }
    if text.get(..1) == Some(b"{") {
        return "JSON text".to_owned();
    }
    format!("bytes {}", head.iter().take(4).map(|byte| format!("{byte:02x}")).collect::<Vec<_>>().join(" "))
}

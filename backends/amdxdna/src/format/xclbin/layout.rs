//! Memory banks, connections and kernel instances.

use super::XclbinError;
use crate::format::bytes::{array_at, slice_at, u32_at, u64_at};

/// A memory bank of MEM_TOPOLOGY or GROUP_TOPOLOGY.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryBank {
    /// Type code.
    pub kind: u8,
    /// Whether a kernel uses it.
    pub used: u8,
    /// Unused bytes 2 to 7.
    pub pad: [u8; 6],
    /// Size in KiB.
    pub size_kib: u64,
    /// Base address.
    pub base: u64,
    /// Name, 16 bytes with padding.
    pub tag: [u8; 16],
}

/// A connection of CONNECTIVITY or GROUP_CONNECTIVITY: argument of an instance to a bank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Connection {
    /// Argument of the kernel.
    pub argument: i32,
    /// Entry of IP_LAYOUT.
    pub ip: i32,
    /// Entry of the topology.
    pub bank: i32,
}

/// A kernel instance of IP_LAYOUT.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IpEntry {
    /// Type code; 7 is the form NPU kernels have.
    pub kind: u32,
    /// Low half: subtype and functional code; high half: kernel id.
    pub properties: u32,
    /// Base address; all ones without one.
    pub base: u64,
    /// `kernel:instance`, 64 bytes with padding.
    pub name: [u8; 64],
}

/// Type code of NPU kernels in IP_LAYOUT.
pub(super) const IP_PS_KERNEL: u32 = 7;

impl MemoryBank {
    const BYTES: usize = 40;

    /// Banks of a topology section.
    pub fn parse_section(data: &[u8]) -> Result<Vec<Self>, XclbinError> {
        let entries = entries("memory topology", data, 8, Self::BYTES)?;
        let banks = entries.map(|raw| Self {
            kind: raw[0],
            used: raw[1],
            pad: array_at(raw, 2).unwrap_or_default(),
            size_kib: u64_at(raw, 8).unwrap_or_default(),
            base: u64_at(raw, 16).unwrap_or_default(),
            tag: array_at(raw, 24).unwrap_or_default(),
        });
        Ok(banks.collect())
    }

    /// Contents of a topology section.
    pub fn write_section(banks: &[Self]) -> Vec<u8> {
        let mut out = count_header(banks.len(), 8);
        for bank in banks {
            out.extend_from_slice(&[bank.kind, bank.used]);
            out.extend_from_slice(&bank.pad);
            out.extend_from_slice(&bank.size_kib.to_le_bytes());
            out.extend_from_slice(&bank.base.to_le_bytes());
            out.extend_from_slice(&bank.tag);
        }
        out
    }
}

impl Connection {
    const BYTES: usize = 12;

    /// Connections of a connectivity section.
    pub fn parse_section(data: &[u8]) -> Result<Vec<Self>, XclbinError> {
        let entries = entries("connectivity", data, 4, Self::BYTES)?;
        let word = |raw, at| u32_at(raw, at).unwrap_or_default() as i32;
        Ok(entries.map(|raw| Self { argument: word(raw, 0), ip: word(raw, 4), bank: word(raw, 8) }).collect())
    }

    /// Contents of a connectivity section.
    pub fn write_section(connections: &[Self]) -> Vec<u8> {
        let mut out = count_header(connections.len(), 4);
        for c in connections {
            out.extend([c.argument, c.ip, c.bank].iter().flat_map(|w| w.to_le_bytes()));
        }
        out
    }
}

impl IpEntry {
    const BYTES: usize = 80;

    /// Entries of an IP_LAYOUT section.
    pub fn parse_section(data: &[u8]) -> Result<Vec<Self>, XclbinError> {
        let entries = entries("IP layout", data, 8, Self::BYTES)?;
        let ips = entries.map(|raw| Self {
            kind: u32_at(raw, 0).unwrap_or_default(),
            properties: u32_at(raw, 4).unwrap_or_default(),
            base: u64_at(raw, 8).unwrap_or_default(),
            name: array_at(raw, 16).unwrap_or([0; 64]),
        });
        Ok(ips.collect())
    }

    /// Contents of an IP_LAYOUT section.
    pub fn write_section(ips: &[Self]) -> Vec<u8> {
        let mut out = count_header(ips.len(), 8);
        for ip in ips {
            out.extend_from_slice(&ip.kind.to_le_bytes());
            out.extend_from_slice(&ip.properties.to_le_bytes());
            out.extend_from_slice(&ip.base.to_le_bytes());
            out.extend_from_slice(&ip.name);
        }
        out
    }
}

/// A count in a header of `header_bytes`, then entries.
fn entries<'a>(
    what: &str,
    data: &'a [u8],
    header_bytes: usize,
    entry_bytes: usize,
) -> Result<std::slice::ChunksExact<'a, u8>, XclbinError> {
    let out_of_range = |at_bytes, len_bytes| XclbinError::OutOfRange {
        what: what.to_owned(),
        container: "the section",
        at_bytes,
        len_bytes,
        container_bytes: data.len() as u64,
    };
    let count = u32_at(data, 0).ok_or_else(|| out_of_range(0, 4))?;
    let len = u64::from(count) * entry_bytes as u64;
    let table = slice_at(data, header_bytes as u64, len).ok_or_else(|| out_of_range(header_bytes as u64, len))?;
    Ok(table.chunks_exact(entry_bytes))
}

fn count_header(count: usize, header_bytes: usize) -> Vec<u8> {
    let mut out = vec![0; header_bytes];
    out[..4].copy_from_slice(&(count as u32).to_le_bytes());
    out
}

//! Command packets as the driver reads them.

/// States that the driver writes.
pub(crate) mod state {
    pub(crate) const COMPLETED: u32 = 4;
    pub(crate) const ERROR: u32 = 5;
    pub(crate) const ABORT: u32 = 6;
    pub(crate) const TIMEOUT: u32 = 8;
    pub(crate) const NORESPONSE: u32 = 9;
}

/// Opcodes.
pub(crate) mod opcode {
    pub(crate) const START_CU: u32 = 0;
    pub(crate) const CMD_CHAIN: u32 = 19;
    pub(crate) const START_NPU: u32 = 20;
    pub(crate) const START_NPU_PREEMPT: u32 = 21;
    pub(crate) const START_NPU_PREEMPT_ELF: u32 = 22;
}

/// Value of the first argument: run a transaction.
const MODE_TRANSACTION: u64 = 3;
/// Offset of the first buffer in a register map: mode, code address and code length come first.
const FIRST_BUFFER_WORD: usize = 5;
/// Most register words of a START_CU outside a chain.
const START_CU_MAX_WORDS: usize = 19;
/// Most argument words of a START_NPU.
const START_NPU_MAX_WORDS: usize = 26;
/// Bytes of the slot buffer that a chain is copied to.
const CHAIN_SLOT_BYTES: usize = 4096;
/// Most entries of a chain of the out-of-tree driver.
const CHAIN_MAX_OUT_OF_TREE: usize = 64;

/// A packet header, taken apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Header(pub(crate) u32);

impl Header {
    pub(crate) fn with_state(self, state: u32) -> u32 {
        self.0 & !0xF | state
    }

    pub(crate) fn extra_masks(self) -> usize {
        (self.0 >> 10 & 3) as usize
    }

    pub(crate) fn count(self) -> usize {
        (self.0 >> 12 & 0x7FF) as usize
    }

    pub(crate) fn opcode(self) -> u32 {
        self.0 >> 23 & 0x1F
    }
}

/// Where the arguments of a run come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Arguments {
    /// `DDR_PATCH` operations take these addresses.
    Packet(Vec<u64>),
    /// The host has patched the descriptors.
    Host,
}

/// A run as the firmware gets it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Launch {
    pub(crate) opcode: u32,
    /// Compute unit; `None` where the mask words are empty.
    pub(crate) unit: Option<u32>,
    pub(crate) code_address: u64,
    pub(crate) code_bytes: u64,
    pub(crate) arguments: Arguments,
    /// What the firmware finds wrong with the register map, which the driver does not look at.
    pub(crate) map_error: Option<String>,
    /// Bytes the entry takes in a chain's slot buffer.
    slot_bytes: usize,
}

/// Reads the packet of one run. `words` are header and body. The error says why the driver refuses it when it is to
/// run.
pub(crate) fn launch(words: &[u32], is_preemptible: bool, is_in_chain: bool) -> Result<Launch, String> {
    let header = Header(*words.first().ok_or("an empty buffer")?);
    let body = words
        .get(1..1 + header.count())
        .ok_or_else(|| format!("{} words behind the header in a buffer of {} words", header.count(), words.len()))?;
    let masks = 1 + header.extra_masks();
    let (masks, payload) = body.split_at_checked(masks).ok_or_else(|| format!("{} words, no CU mask", body.len()))?;
    let unit = masks.iter().zip(0..).find(|(mask, _)| **mask != 0).map(|(mask, i)| 32 * i + mask.trailing_zeros());
    let base = Launch {
        opcode: header.opcode(),
        unit,
        code_address: 0,
        code_bytes: 0,
        arguments: Arguments::Host,
        map_error: None,
        slot_bytes: 0,
    };
    match header.opcode() {
        opcode::START_CU => start_cu(base, payload, is_in_chain),
        opcode::START_NPU => start_npu(base, payload),
        opcode::START_NPU_PREEMPT | opcode::START_NPU_PREEMPT_ELF if is_preemptible => preemptible(base, payload),
        other => Err(format!("opcode {other} is not supported")),
    }
}

fn start_cu(base: Launch, map: &[u32], is_in_chain: bool) -> Result<Launch, String> {
    if !is_in_chain && map.len() > START_CU_MAX_WORDS {
        return Err(format!("{} register words; a single START_CU has at most {START_CU_MAX_WORDS}", map.len()));
    }
    let base = Launch { slot_bytes: 52 + 4 * map.len(), ..base };
    let Some(fixed) = map.get(..FIRST_BUFFER_WORD) else {
        return Ok(Launch { map_error: Some(format!("{} register words", map.len())), ..base });
    };
    let mode = join(fixed[0], fixed[1]);
    let wrong_mode = || format!("mode {mode:#x}; wanted {MODE_TRANSACTION} (run a transaction)");
    Ok(Launch {
        code_address: join(fixed[2], fixed[3]),
        // The one length in 32-bit words.
        code_bytes: u64::from(fixed[4]) * 4,
        arguments: Arguments::Packet(buffers(map)),
        map_error: (mode != MODE_TRANSACTION).then(wrong_mode),
        ..base
    })
}

fn start_npu(base: Launch, payload: &[u32]) -> Result<Launch, String> {
    let (fixed, map) = payload.split_at_checked(4).ok_or_else(|| format!("a payload of {} words", payload.len()))?;
    if fixed[3] != 0 {
        return Err(format!("{} instruction property words; wanted none", fixed[3]));
    }
    if map.len() > START_NPU_MAX_WORDS {
        return Err(format!("{} argument words; a START_NPU has at most {START_NPU_MAX_WORDS}", map.len()));
    }
    Ok(Launch {
        code_address: join(fixed[0], fixed[1]),
        code_bytes: fixed[2].into(),
        arguments: start_npu_arguments(map),
        slot_bytes: 52 + 4 * map.len(),
        ..base
    })
}

/// Inferred, check on hardware: a START_NPU whose argument words hold the mode alone is the partial-ELF flow, whose
/// descriptors the host has patched; its `DDR_PATCH` operations are ignored. With a whole register map they apply.
fn start_npu_arguments(map: &[u32]) -> Arguments {
    if map.len() > FIRST_BUFFER_WORD { Arguments::Packet(buffers(map)) } else { Arguments::Host }
}

fn preemptible(base: Launch, payload: &[u32]) -> Result<Launch, String> {
    let fixed = payload.get(..10).ok_or_else(|| format!("a payload of {} words", payload.len()))?;
    if fixed[9] != 0 {
        return Err(format!("{} instruction property words; wanted none", fixed[9]));
    }
    Ok(Launch {
        code_address: join(fixed[0], fixed[1]),
        code_bytes: fixed[6].into(),
        arguments: preemptible_arguments(base.opcode),
        slot_bytes: 56,
        ..base
    })
}

/// Inferred, check on hardware: the driver sends one argument word, the mode, for control code of an ELF with
/// preemption, so that `DDR_PATCH` operations left in the code have nothing to apply and are ignored.
fn preemptible_arguments(_opcode: u32) -> Arguments {
    Arguments::Host
}

/// Buffer addresses of a register map.
fn buffers(map: &[u32]) -> Vec<u64> {
    map[FIRST_BUFFER_WORD.min(map.len())..].chunks_exact(2).map(|pair| join(pair[0], pair[1])).collect()
}

/// Handles of a chain; the error is one that EXEC_CMD reports as `EINVAL`.
pub(crate) fn chain_handles(words: &[u32]) -> Result<Vec<u32>, String> {
    let header = Header(*words.first().ok_or("an empty buffer")?);
    let body = words.get(1..1 + header.count()).ok_or("the count exceeds the buffer")?;
    let count = *body.first().ok_or("a chain without a body")? as usize;
    let handles = body.get(6..).unwrap_or_default();
    if count == 0 || handles.len() < 2 * count {
        return Err(format!("a chain of {count} commands with room for {}", handles.len() / 2));
    }
    let handles = handles.chunks_exact(2).take(count).map(|pair| join(pair[0], pair[1]));
    handles
        .map(|handle| {
            u32::try_from(handle).ok().filter(|h| *h != 0).ok_or_else(|| format!("command handle {handle:#x}"))
        })
        .collect()
}

/// Rules for a chain as a whole, which the driver checks when it is to run.
pub(crate) fn check_chain(launches: &[Launch], is_out_of_tree: bool) -> Result<(), String> {
    if is_out_of_tree && launches.len() > CHAIN_MAX_OUT_OF_TREE {
        return Err(format!("a chain of {} commands; at most {CHAIN_MAX_OUT_OF_TREE}", launches.len()));
    }
    if let Some(other) = launches.iter().find(|launch| launch.opcode != launches[0].opcode) {
        return Err(format!("a chain with opcodes {} and {}", launches[0].opcode, other.opcode));
    }
    let slot_bytes: usize = launches.iter().map(|launch| launch.slot_bytes).sum();
    if slot_bytes > CHAIN_SLOT_BYTES {
        return Err(format!("a chain of {slot_bytes} bytes; a slot has {CHAIN_SLOT_BYTES}"));
    }
    Ok(())
}

fn join(low: u32, high: u32) -> u64 {
    u64::from(high) << 32 | u64::from(low)
}

#[cfg(test)]
mod tests {
    use super::{Arguments, chain_handles, check_chain, launch};

    #[test]
    fn a_start_cu_of_a_public_client_is_read() {
        let words = [
            0x3000_E001,
            1,
            3,
            0,
            0x0402_8000,
            0,
            14,
            0x112B_4570,
            0x7E,
            0x114E_8AF0,
            0x7E,
            0x1171_D080,
            0x7E,
            0x1195_1620,
            0x7E,
        ];
        let launch = launch(&words, false, false).unwrap();
        assert_eq!((launch.unit, launch.code_address, launch.code_bytes), (Some(0), 0x0402_8000, 56));
        let buffers = vec![0x7E_112B_4570, 0x7E_114E_8AF0, 0x7E_1171_D080, 0x7E_1195_1620];
        assert_eq!(launch.arguments, Arguments::Packet(buffers));
    }

    #[test]
    fn control_code_of_elfs_has_no_packet_arguments() {
        let npu = launch(&[0x3A00_7001, 1, 0x0402_8000, 0, 0x10AF8, 0, 3, 0], false, false).unwrap();
        assert_eq!((npu.code_bytes, npu.arguments), (0x10AF8, Arguments::Host));
        let elf =
            [0x3B00_D001, 0, 0x0402_0000, 0, 0x0402_8000, 0, 0x0403_0000, 0, 0x200, 0x60, 0x60, 0, 0x6161_7000, 0x7E12];
        let parsed = launch(&elf, true, false).unwrap();
        assert_eq!((parsed.unit, parsed.code_address, parsed.code_bytes), (None, 0x0402_0000, 0x200));
        assert_eq!(parsed.arguments, Arguments::Host);
        assert_eq!(launch(&elf, false, false).unwrap_err(), "opcode 22 is not supported");
    }

    #[test]
    fn malformed_packets_are_refused_with_a_reason() {
        for words in
            [&[][..], &[0x3000_0001], &[0x3000_1001], &[0x3A00_4001, 1, 0, 0, 0], &[0x3A00_5001, 1, 0, 0, 0, 1]]
        {
            assert!(launch(words, true, false).is_err(), "{words:x?}");
        }
        for words in [&[0x3000_2001, 1, 3][..], &[0x3000_6001, 1, 2, 0, 0, 0, 0]] {
            assert!(launch(words, true, false).unwrap().map_error.is_some(), "the firmware's business: {words:x?}");
        }
        let mut long = vec![0x3000_0001 | 21 << 12, 1, 3, 0];
        long.resize(22, 0);
        assert!(launch(&long, false, true).is_ok());
        assert!(launch(&long, false, false).unwrap_err().contains("20 register words"));
    }

    #[test]
    fn chains_are_uniform_and_fit_their_slot() {
        let words = [0x0980_A001, 2, 0, 0, 0, 0, 0, 10, 0, 11, 0];
        assert_eq!(chain_handles(&words).unwrap(), [10, 11]);
        assert!(chain_handles(&[0x0980_6001, 0, 0, 0, 0, 0, 0]).is_err());
        assert!(chain_handles(&[0x0980_8001, 2, 0, 0, 0, 0, 0, 10, 0]).is_err());
        assert!(chain_handles(&[0x0980_8001, 1, 0, 0, 0, 0, 0, 0, 0]).is_err());
        let npu = launch(&[0x3A00_7001, 1, 0x0402_8000, 0, 0x10AF8, 0, 3, 0], false, true).unwrap();
        let mut other = npu.clone();
        other.opcode = 0;
        assert!(check_chain(&[npu.clone(), other], false).is_err());
        assert!(check_chain(&vec![npu.clone(); 65], true).is_err());
        assert!(check_chain(&vec![npu.clone(); 68], false).is_ok());
        assert!(check_chain(&vec![npu; 69], false).is_err());
    }
}

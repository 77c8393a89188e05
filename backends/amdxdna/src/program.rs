//! A kernel as the client needs it: code templates, the places where addresses go, the form of the command.
//!
//! Containers (xclbin, ELF) are parsed elsewhere; this is what is left of them once a context is open. Nothing here lives in
//! device memory: instruction buffers belong to the runs of a runlist.

use crate::format::reloc::PatchTable;
use crate::packet::Opcode;
use npuhal_core::device::{ArgSpec, LengthUnit};
use std::sync::Arc;

/// A loaded kernel.
#[derive(Debug)]
pub(crate) struct KernelProgram {
    /// Name, for messages.
    pub(crate) name: String,
    /// Arguments of a run.
    pub(crate) signature: Vec<ArgSpec>,
    /// Whether a run may leave out trailing arguments.
    pub(crate) allows_fewer_args: bool,
    /// How a run is started.
    pub(crate) launch: Launch,
    /// Code and data that go to the device, in the order in which they are patched.
    pub(crate) sections: Vec<Section>,
    /// Configurations named by [`Source::Pdi`].
    pub(crate) pdis: Vec<Arc<[u8]>>,
}

/// How a run is started.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Launch {
    /// A compute unit with a register map.
    Registers { unit: u32, map: RegisterMap },
    /// Control code on a compute unit of an xclbin.
    Unit { unit: u32, is_preemptible: bool },
    /// Control code of a full ELF.
    FullElf { opcode: Opcode },
}

impl Launch {
    pub(crate) fn opcode(&self) -> Opcode {
        match self {
            Self::Registers { .. } => Opcode::StartCu,
            Self::Unit { is_preemptible: false, .. } => Opcode::StartNpu,
            Self::Unit { is_preemptible: true, .. } => Opcode::StartNpuPreempt,
            Self::FullElf { opcode } => *opcode,
        }
    }
}

/// Where the arguments of a register-mapped kernel go. Offsets in bytes, as the container declares them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RegisterMap {
    pub(crate) mode: Register,
    pub(crate) code: Register,
    pub(crate) code_length: Register,
    pub(crate) length_unit: LengthUnit,
    /// Registers of the signature's arguments.
    pub(crate) args: Vec<Register>,
    /// Length of the map in words: up to the end of the last declared argument.
    pub(crate) words: usize,
}

/// One register of a map.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Register {
    pub(crate) at_bytes: usize,
    pub(crate) len_bytes: usize,
}

impl RegisterMap {
    /// The map filled with a run's values; registers without a value are 0.
    pub(crate) fn fill(&self, mode: u64, code_address: u64, code_bytes: u64, args: &[u64]) -> Vec<u32> {
        let length = match self.length_unit {
            LengthUnit::Words => code_bytes / 4,
            LengthUnit::Bytes => code_bytes,
        };
        let mut bytes = vec![0; 4 * self.words];
        let fixed = [(self.mode, mode), (self.code, code_address), (self.code_length, length)];
        for (register, value) in fixed.into_iter().chain(self.args.iter().copied().zip(args.iter().copied())) {
            let end = register.at_bytes + register.len_bytes;
            if let Some(field) = bytes.get_mut(register.at_bytes..end) {
                field.copy_from_slice(&value.to_le_bytes()[..register.len_bytes]);
            }
        }
        bytes.chunks_exact(4).map(|word| u32::from_le_bytes([word[0], word[1], word[2], word[3]])).collect()
    }
}

/// What a section is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Role {
    /// Control code.
    Instructions,
    /// Control code that saves the array.
    Save,
    /// Control code that restores the array.
    Restore,
    /// Payload of control packets.
    ControlPacket,
    /// Control packets that load program memory, by number.
    PmPacket(u32),
}

/// Code or data that goes to the device.
#[derive(Debug)]
pub(crate) struct Section {
    pub(crate) role: Role,
    /// Contents before patching.
    pub(crate) template: Arc<[u8]>,
    /// Places where addresses go.
    pub(crate) table: PatchTable,
    /// Where the value of each symbol of `table` comes from.
    pub(crate) sources: Vec<Source>,
}

/// Where a patched value comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Source {
    /// Address of the run's argument with this position in the signature.
    Argument(u32),
    /// Memory for saving the array, one a context.
    ScratchMemory,
    /// Device memory for the state of the control code, one a run, of this size.
    ScratchControl(u32),
    /// Address of the [`Role::ControlPacket`] section.
    ControlPacket,
    /// Address of a [`Role::PmPacket`] section.
    PmPacket(u32),
    /// Address of one of the program's configurations.
    Pdi(u32),
}

/// Host memory of one place of a patch table, about.
const SITE_BYTES: usize = 32;

impl KernelProgram {
    /// The section with `role`.
    pub(crate) fn section(&self, role: Role) -> Option<&Section> {
        self.sections.iter().find(|section| section.role == role)
    }

    /// Bytes of host memory behind the program.
    pub(crate) fn host_bytes(&self) -> u64 {
        let section = |section: &Section| section.template.len() + SITE_BYTES * section.table.site_count();
        let sections: usize = self.sections.iter().map(section).sum();
        (sections + self.pdis.iter().map(|pdi| pdi.len()).sum::<usize>()) as u64
    }

    /// Whether runs of both take the same arguments.
    pub(crate) fn same_signature(&self, other: &Self) -> bool {
        self.signature.iter().map(|arg| &arg.kind).eq(other.signature.iter().map(|arg| &arg.kind))
    }
}

#[cfg(test)]
mod tests {
    use super::{Register, RegisterMap};
    use npuhal_core::device::LengthUnit;

    /// The map of the open tool-chain's kernels with five buffers; words as in a recorded packet.
    #[test]
    fn register_maps_hold_unaligned_values_and_zeros_for_what_is_unset() {
        let register = |at_bytes, len_bytes| Register { at_bytes, len_bytes };
        let map = RegisterMap {
            mode: register(0, 8),
            code: register(8, 8),
            code_length: register(0x10, 4),
            length_unit: LengthUnit::Words,
            args: (0..5).map(|i| register(0x14 + 8 * i, 8)).collect(),
            words: 15,
        };
        let args = [0x7E11_8DD0_7000, 0x7E11_B115_F000, 0x7E11_D45B_8000, 0x7E11_F7A1_2000];
        let words = map.fill(3, 0x0402_8000, 56, &args);
        let expected = [
            3,
            0,
            0x0402_8000,
            0,
            14,
            0x8DD0_7000,
            0x7E11,
            0xB115_F000,
            0x7E11,
            0xD45B_8000,
            0x7E11,
            0xF7A1_2000,
            0x7E11,
            0,
            0,
        ];
        assert_eq!(words, expected);
        let bytes = RegisterMap { length_unit: LengthUnit::Bytes, ..map };
        assert_eq!(bytes.fill(3, 0, 56, &[])[4], 56);
    }
}

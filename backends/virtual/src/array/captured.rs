//! Control code of a vendor's runtime on the virtual array: what it relies on must be what the array allows.
//!
//! The files are not part of the repository; the tests run where their folder is.

use super::program::{CoreProgram, CoreProgramTable, Step, StreamKey, Streams};
use super::{DeviceMemory, Loads, Partition, Surroundings, Trouble};
use crate::clock::Traffic;
use crate::diagnosis::{Diagnosis, DiagnosisKind, DiagnosisLog};
use crate::golden::{CAPTURED_LAYERS, shared_golden};
use crate::packet::Arguments;
use npuhal_amdxdna::format::registers::{Register, ShimDemux, ShimMux, ShimRoute};
use std::cell::Cell;

/// First two header words of version 0.1 for an AIE2P partition of 8 columns.
const PROPER: [u8; 8] = [0, 1, 4, 6, 8, 1, 0, 0];
/// Arguments of a captured layer, far apart: activations, weights, two small ones, KV cache.
const ARGUMENTS: [(u64, u64); 5] = [
    (0x1000_0000, 0x800),
    (0x2000_0000, 0x96_0000),
    (0x3000_0000, 0x1000),
    (0x4000_0000, 0x300),
    (0x5000_0000, 0x100_0000),
];

/// Takes whatever comes and gives zeros to whoever wants.
#[derive(Debug)]
struct Sponge;

impl CoreProgram for Sponge {
    fn step(&mut self, streams: &mut Streams<'_>) -> Step {
        let zeros = [0; 64];
        let mut portion = [0; 4096];
        for column in 0..8 {
            for channel in 0..2 {
                let output = StreamKey::output(column, channel);
                if streams.is_wanted(output) && streams.write(output, &zeros) {
                    return Step::Progress;
                }
                for packet in [None, Some(0), Some(1)] {
                    let input = StreamKey { packet, ..StreamKey::input(column, channel) };
                    if [4096, 64, 4].into_iter().any(|len| streams.read(input, &mut portion[..len])) {
                        return Step::Progress;
                    }
                }
            }
        }
        Step::Waiting
    }

    fn unfinished(&self) -> Option<String> {
        None
    }
}

/// The buffers of a layer: contents are of no interest, bounds are.
struct Layer {
    read_bytes: Cell<u64>,
    written_bytes: Cell<u64>,
}

impl Layer {
    fn check(address: u64, len: usize) -> Result<(), Diagnosis> {
        let inside = ARGUMENTS.iter().any(|(at, size)| address >= *at && address + len as u64 <= at + size);
        let detail = format!("{len} bytes at {address:#x}");
        if inside { Ok(()) } else { Err(Diagnosis::new(DiagnosisKind::OutsideArguments, detail)) }
    }
}

impl DeviceMemory for Layer {
    fn read(&self, address: u64, dst: &mut [u8]) -> Result<(), Diagnosis> {
        self.read_bytes.set(self.read_bytes.get() + dst.len() as u64);
        dst.fill(0);
        Self::check(address, dst.len())
    }

    fn write(&self, address: u64, src: &[u8]) -> Result<(), Diagnosis> {
        self.written_bytes.set(self.written_bytes.get() + src.len() as u64);
        Self::check(address, src.len())
    }

    fn read_code(&self, _address: u64, _len_bytes: u64) -> Result<Vec<u8>, Diagnosis> {
        Err(Diagnosis::new(DiagnosisKind::BadControlCode, "no image is expected"))
    }
}

#[test]
fn captured_layers_run_to_the_end() {
    let Some(folder) = shared_golden("captured_layers_run_to_the_end", CAPTURED_LAYERS) else { return };
    for length in [1_u64, 16, 256, 4096] {
        let mut code = std::fs::read(folder.join(format!("layer_L{length}.bin"))).unwrap();
        code[..8].copy_from_slice(&PROPER);
        let mut partition = Partition::new(8);
        partition.program = Some(Box::new(Sponge));
        let programs = CoreProgramTable::new();
        let dma = ShimRoute::Dma;
        for column in 0..8 {
            let at = |register: Register| register.at(column, 0).unwrap().to_word();
            partition.store(at(Register::ShimMux), ShimMux { south: [dma; 4] }.encode(), 0, &programs).unwrap();
            partition.store(at(Register::ShimDemux), ShimDemux { south: [dma; 4] }.encode(), 0, &programs).unwrap();
        }
        let (memory, log, mut loads) = (
            Layer { read_bytes: Cell::new(0), written_bytes: Cell::new(0) },
            DiagnosisLog::default(),
            Loads::default(),
        );
        let mut surroundings = Surroundings { memory: &memory, programs: &programs, log: &log, loads: &mut loads };
        let arguments = Arguments::Packet(ARGUMENTS.iter().map(|(at, _)| *at).collect());
        match partition.run(&code, &arguments, true, &mut surroundings) {
            Ok(()) => {}
            Err(Trouble::Fault(diagnosis) | Trouble::Hang(diagnosis)) => panic!("L{length}: {diagnosis}"),
        }
        let diagnoses: Vec<_> = log.to_vec().iter().map(ToString::to_string).collect();
        assert!(diagnoses.is_empty(), "L{length}: {diagnoses:#?}");
        let traffic = partition.take_traffic();
        assert_eq!(traffic.read_bytes, memory.read_bytes.get());
        assert_eq!(traffic.written_bytes, memory.written_bytes.get());
        // Weights, four regions of the cache in blocks of 16 rows, activations and two small inputs; four new rows of
        // the cache and the activations back.
        let cache = 4 * 0x4000 * length.div_ceil(16);
        let wanted = Traffic {
            read_bytes: 9_830_400 + cache + 0x800 + 0x1000 + 0x300,
            read_streams: 14,
            written_bytes: 4 * 0x400 + 0x800,
            write_streams: 3,
        };
        assert_eq!(traffic, wanted, "L{length}");
    }
}

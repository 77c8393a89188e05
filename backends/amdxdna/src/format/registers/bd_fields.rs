//! Where the fields of buffer descriptors are.

use super::RegisterError;
use super::bd::{Dimension, Iteration, LockUse, PacketHeader};
use super::bits::Field;

/// Fields of the shared sub-structures, wherever a layout puts them.
pub(super) struct LockFields {
    release_value: Field,
    release_id: Field,
    acquire_enable: Field,
    acquire_value: Field,
    acquire_id: Field,
}

impl LockFields {
    pub(super) fn get(&self, words: &[u32]) -> LockUse {
        LockUse {
            acquire_enable: self.acquire_enable.get_flag(words),
            acquire_value: self.acquire_value.get_signed(words),
            acquire_id: self.acquire_id.get(words),
            release_value: self.release_value.get_signed(words),
            release_id: self.release_id.get(words),
        }
    }

    pub(super) fn set(&self, words: &mut [u32], locks: LockUse) -> Result<(), RegisterError> {
        self.acquire_enable.set_flag(words, locks.acquire_enable);
        self.acquire_value.set_signed(words, locks.acquire_value)?;
        self.acquire_id.set(words, locks.acquire_id)?;
        self.release_value.set_signed(words, locks.release_value)?;
        self.release_id.set(words, locks.release_id)
    }
}

pub(super) struct PacketFields {
    enable: Field,
    id: Field,
    kind: Field,
}

impl PacketFields {
    pub(super) fn get(&self, words: &[u32]) -> PacketHeader {
        PacketHeader { enable: self.enable.get_flag(words), id: self.id.get(words), kind: self.kind.get(words) }
    }

    pub(super) fn set(&self, words: &mut [u32], packet: PacketHeader) -> Result<(), RegisterError> {
        self.enable.set_flag(words, packet.enable);
        self.id.set(words, packet.id)?;
        self.kind.set(words, packet.kind)
    }
}

pub(super) struct IterationFields {
    current: Field,
    wrap: Field,
    step: Field,
}

impl IterationFields {
    pub(super) fn get(&self, words: &[u32]) -> Iteration {
        Iteration { current: self.current.get(words), wrap: self.wrap.get(words) + 1, step: self.step.get(words) + 1 }
    }

    pub(super) fn set(&self, words: &mut [u32], iteration: Iteration) -> Result<(), RegisterError> {
        self.current.set(words, iteration.current)?;
        self.wrap.set_minus_one(words, iteration.wrap)?;
        self.step.set_minus_one(words, iteration.step)
    }
}

pub(super) struct DimensionFields {
    wrap: Field,
    step: Field,
}

impl DimensionFields {
    pub(super) fn get(&self, words: &[u32]) -> Dimension {
        Dimension { wrap: self.wrap.get(words), step: self.step.get(words) + 1 }
    }

    pub(super) fn set(&self, words: &mut [u32], dimension: Dimension) -> Result<(), RegisterError> {
        self.wrap.set(words, dimension.wrap)?;
        self.step.set_minus_one(words, dimension.step)
    }
}

/// Lock fields of shim and core descriptors, which share their last word.
const fn lock_fields(word: usize) -> LockFields {
    LockFields {
        release_value: Field::new("lock release value", word, 24, 18),
        release_id: Field::new("lock release id", word, 16, 13),
        acquire_enable: Field::new("lock acquire enable", word, 12, 12),
        acquire_value: Field::new("lock acquire value", word, 11, 5),
        acquire_id: Field::new("lock acquire id", word, 3, 0),
    }
}

/// Shim tiles.
pub(super) mod shim {
    use super::*;
    pub(in super::super) const LENGTH: Field = Field::new("buffer length", 0, 31, 0);
    pub(in super::super) const ADDRESS_LOW: Field = Field::new("base address low", 1, 31, 2);
    pub(in super::super) const ADDRESS_HIGH: Field = Field::new("base address high", 2, 15, 0);
    pub(in super::super) const OOO: Field = Field::new("out-of-order id", 2, 29, 24);
    pub(in super::super) const PACKET: PacketFields = PacketFields {
        enable: Field::new("enable packet", 2, 30, 30),
        id: Field::new("packet id", 2, 23, 19),
        kind: Field::new("packet type", 2, 18, 16),
    };
    pub(in super::super) const SECURE: Field = Field::new("secure", 3, 30, 30);
    pub(in super::super) const D0: DimensionFields =
        DimensionFields { wrap: Field::new("D0 wrap", 3, 29, 20), step: Field::new("D0 step", 3, 19, 0) };
    pub(in super::super) const BURST: Field = Field::new("burst length", 4, 31, 30);
    pub(in super::super) const D1: DimensionFields =
        DimensionFields { wrap: Field::new("D1 wrap", 4, 29, 20), step: Field::new("D1 step", 4, 19, 0) };
    pub(in super::super) const SMID: Field = Field::new("SMID", 5, 31, 28);
    pub(in super::super) const CACHE: Field = Field::new("AxCache", 5, 27, 24);
    pub(in super::super) const QOS: Field = Field::new("AxQoS", 5, 23, 20);
    pub(in super::super) const D2_STEP: Field = Field::new("D2 step", 5, 19, 0);
    pub(in super::super) const ITERATION: IterationFields = IterationFields {
        current: Field::new("iteration current", 6, 31, 26),
        wrap: Field::new("iteration wrap", 6, 25, 20),
        step: Field::new("iteration step", 6, 19, 0),
    };
    pub(in super::super) const TLAST: Field = Field::new("TLAST suppress", 7, 31, 31);
    pub(in super::super) const NEXT: Field = Field::new("next BD", 7, 30, 27);
    pub(in super::super) const USE_NEXT: Field = Field::new("use next BD", 7, 26, 26);
    pub(in super::super) const VALID: Field = Field::new("valid", 7, 25, 25);
    pub(in super::super) const LOCKS: LockFields = lock_fields(7);
    pub(in super::super) const ALL: [Field; 29] = [
        LENGTH,
        ADDRESS_LOW,
        ADDRESS_HIGH,
        OOO,
        PACKET.enable,
        PACKET.id,
        PACKET.kind,
        SECURE,
        D0.wrap,
        D0.step,
        BURST,
        D1.wrap,
        D1.step,
        SMID,
        CACHE,
        QOS,
        D2_STEP,
        ITERATION.current,
        ITERATION.wrap,
        ITERATION.step,
        TLAST,
        NEXT,
        USE_NEXT,
        VALID,
        LOCKS.release_value,
        LOCKS.release_id,
        LOCKS.acquire_enable,
        LOCKS.acquire_value,
        LOCKS.acquire_id,
    ];
}

/// Memory tiles.
pub(super) mod mem {
    use super::*;
    pub(in super::super) const PACKET: PacketFields = PacketFields {
        enable: Field::new("enable packet", 0, 31, 31),
        id: Field::new("packet id", 0, 27, 23),
        kind: Field::new("packet type", 0, 30, 28),
    };
    pub(in super::super) const OOO: Field = Field::new("out-of-order id", 0, 22, 17);
    pub(in super::super) const LENGTH: Field = Field::new("buffer length", 0, 16, 0);
    pub(in super::super) const NEXT: Field = Field::new("next BD", 1, 25, 20);
    pub(in super::super) const USE_NEXT: Field = Field::new("use next BD", 1, 19, 19);
    pub(in super::super) const ADDRESS: Field = Field::new("base address", 1, 18, 0);
    pub(in super::super) const TLAST: Field = Field::new("TLAST suppress", 2, 31, 31);
    pub(in super::super) const COMPRESSION: Field = Field::new("compression", 4, 31, 31);
    pub(in super::super) const WRAP: [Field; 3] =
        [Field::new("D0 wrap", 2, 26, 17), Field::new("D1 wrap", 3, 26, 17), Field::new("D2 wrap", 4, 26, 17)];
    pub(in super::super) const STEP: [Field; 3] =
        [Field::new("D0 step", 2, 16, 0), Field::new("D1 step", 3, 16, 0), Field::new("D2 step", 4, 16, 0)];
    pub(in super::super) const BEFORE: [Field; 3] = [
        Field::new("D0 zero-before", 1, 31, 26),
        Field::new("D1 zero-before", 3, 31, 27),
        Field::new("D2 zero-before", 4, 30, 27),
    ];
    pub(in super::super) const AFTER: [Field; 3] = [
        Field::new("D0 zero-after", 5, 22, 17),
        Field::new("D1 zero-after", 5, 27, 23),
        Field::new("D2 zero-after", 5, 31, 28),
    ];
    pub(in super::super) const D3_STEP: Field = Field::new("D3 step", 5, 16, 0);
    pub(in super::super) const ITERATION: IterationFields = IterationFields {
        current: Field::new("iteration current", 6, 28, 23),
        wrap: Field::new("iteration wrap", 6, 22, 17),
        step: Field::new("iteration step", 6, 16, 0),
    };
    pub(in super::super) const VALID: Field = Field::new("valid", 7, 31, 31);
    pub(in super::super) const LOCKS: LockFields = LockFields {
        release_value: Field::new("lock release value", 7, 30, 24),
        release_id: Field::new("lock release id", 7, 23, 16),
        acquire_enable: Field::new("lock acquire enable", 7, 15, 15),
        acquire_value: Field::new("lock acquire value", 7, 14, 8),
        acquire_id: Field::new("lock acquire id", 7, 7, 0),
    };
    pub(in super::super) const ALL: [Field; 32] = [
        PACKET.enable,
        PACKET.id,
        PACKET.kind,
        OOO,
        LENGTH,
        NEXT,
        USE_NEXT,
        ADDRESS,
        TLAST,
        COMPRESSION,
        WRAP[0],
        WRAP[1],
        WRAP[2],
        STEP[0],
        STEP[1],
        STEP[2],
        BEFORE[0],
        BEFORE[1],
        BEFORE[2],
        AFTER[0],
        AFTER[1],
        AFTER[2],
        D3_STEP,
        ITERATION.current,
        ITERATION.wrap,
        ITERATION.step,
        VALID,
        LOCKS.release_value,
        LOCKS.release_id,
        LOCKS.acquire_enable,
        LOCKS.acquire_value,
        LOCKS.acquire_id,
    ];
}

/// Core tiles.
pub(super) mod core_tile {
    use super::*;
    pub(in super::super) const ADDRESS: Field = Field::new("base address", 0, 27, 14);
    pub(in super::super) const LENGTH: Field = Field::new("buffer length", 0, 13, 0);
    pub(in super::super) const COMPRESSION: Field = Field::new("compression", 1, 31, 31);
    pub(in super::super) const PACKET: PacketFields = PacketFields {
        enable: Field::new("enable packet", 1, 30, 30),
        id: Field::new("packet id", 1, 23, 19),
        kind: Field::new("packet type", 1, 18, 16),
    };
    pub(in super::super) const OOO: Field = Field::new("out-of-order id", 1, 29, 24);
    pub(in super::super) const D0: DimensionFields =
        DimensionFields { wrap: Field::new("D0 wrap", 3, 20, 13), step: Field::new("D0 step", 2, 12, 0) };
    pub(in super::super) const D1: DimensionFields =
        DimensionFields { wrap: Field::new("D1 wrap", 3, 28, 21), step: Field::new("D1 step", 2, 25, 13) };
    pub(in super::super) const D2_STEP: Field = Field::new("D2 step", 3, 12, 0);
    pub(in super::super) const ITERATION: IterationFields = IterationFields {
        current: Field::new("iteration current", 4, 24, 19),
        wrap: Field::new("iteration wrap", 4, 18, 13),
        step: Field::new("iteration step", 4, 12, 0),
    };
    pub(in super::super) const TLAST: Field = Field::new("TLAST suppress", 5, 31, 31);
    pub(in super::super) const NEXT: Field = Field::new("next BD", 5, 30, 27);
    pub(in super::super) const USE_NEXT: Field = Field::new("use next BD", 5, 26, 26);
    pub(in super::super) const VALID: Field = Field::new("valid", 5, 25, 25);
    pub(in super::super) const LOCKS: LockFields = lock_fields(5);
    pub(in super::super) const ALL: [Field; 24] = [
        ADDRESS,
        LENGTH,
        COMPRESSION,
        PACKET.enable,
        PACKET.id,
        PACKET.kind,
        OOO,
        D0.wrap,
        D0.step,
        D1.wrap,
        D1.step,
        D2_STEP,
        ITERATION.current,
        ITERATION.wrap,
        ITERATION.step,
        TLAST,
        NEXT,
        USE_NEXT,
        VALID,
        LOCKS.release_value,
        LOCKS.release_id,
        LOCKS.acquire_enable,
        LOCKS.acquire_value,
        LOCKS.acquire_id,
    ];
}

//! Object FIFOs between the tiles of a design: a ring of buffers in a tile's data memory.

/// What a buffer of bf16 holds before anything was written to it: NaN.
pub(super) const STALE: u16 = u16::from_le_bytes([STALE_BYTE; 2]);
/// The same for a buffer of bytes: NaN in bf16 and in f32.
pub(super) const STALE_BYTE: u8 = 0xFF;

/// A FIFO of `depth` objects. Its buffers are used in turns and keep what was in them: the producer of an object finds
/// there the object `depth` before.
#[derive(Debug)]
pub(super) struct ObjectFifo<T> {
    buffers: Vec<Box<[T]>>,
    /// Buffer that the consumer holds next.
    first: usize,
    filled: usize,
}

impl<T: Copy> ObjectFifo<T> {
    pub(super) fn new(depth: usize, elements: usize, stale: T) -> Self {
        Self { buffers: vec![vec![stale; elements].into_boxed_slice(); depth], first: 0, filled: 0 }
    }

    pub(super) fn len(&self) -> usize {
        self.filled
    }

    /// The buffer that the producer fills next; `None` while all are full.
    pub(super) fn free(&mut self) -> Option<&mut [T]> {
        let at = (self.first + self.filled) % self.buffers.len();
        (self.filled < self.buffers.len()).then(|| &mut self.buffers[at][..])
    }

    /// Hands the buffer of [`ObjectFifo::free`] to the consumer.
    pub(super) fn release(&mut self) {
        self.filled = self.buffers.len().min(self.filled + 1);
    }

    /// The oldest object.
    pub(super) fn front(&self) -> Option<&[T]> {
        (self.filled > 0).then(|| &self.buffers[self.first][..])
    }

    /// Gives the oldest object's buffer back to the producer.
    pub(super) fn pop(&mut self) {
        if self.filled > 0 {
            self.first = (self.first + 1) % self.buffers.len();
            self.filled -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_take_turns_and_keep_what_was_in_them() {
        let mut fifo = ObjectFifo::new(2, 1, 9);
        assert!(fifo.front().is_none());
        for value in 1..=2 {
            let free = fifo.free().unwrap();
            assert_eq!(free[0], 9);
            free[0] = value;
            fifo.release();
        }
        assert!(fifo.free().is_none());
        assert_eq!((fifo.len(), fifo.front().unwrap()[0]), (2, 1));
        fifo.pop();
        assert_eq!(fifo.free().unwrap()[0], 1);
        assert_eq!(fifo.front().unwrap()[0], 2);
        fifo.pop();
        assert!(fifo.front().is_none());
        assert!(f32::from_le_bytes([STALE_BYTE; 4]).is_nan() && f32::from_bits(u32::from(STALE) << 16).is_nan());
    }
}

//! Limits of a machine that the kernels are held against, as loops to be timed beside them.

use crate::error::CpuError;
use crate::features::Features;
use crate::memory::Arena;
use crate::pool::{JobPanicked, Pool};
use std::hint::black_box;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes that a thread reads before it takes the next.
const READ_BYTES: usize = 256 << 10;

/// Reads all of `bytes` but a rest below 128, each thread of `pool` one contiguous part as long as all run; returns something
/// that depends on every byte. The limit of a product with one row, which reads its weights once.
///
/// # Errors
/// [`JobPanicked`].
pub fn read(pool: &Pool, bytes: &[u8]) -> Result<u64, JobPanicked> {
    let all = AtomicU64::new(0);
    pool.run_items(bytes.len().div_ceil(READ_BYTES), &|_, item| {
        let part = &bytes[item * READ_BYTES..bytes.len().min((item + 1) * READ_BYTES)];
        let mut lanes = [0u64; 16];
        for chunk in part.as_chunks::<128>().0 {
            // As the AVX2 kernels do.
            #[cfg(target_arch = "x86_64")]
            crate::gemv::ask_ahead(chunk.as_ptr(), chunk.len());
            for (lane, word) in lanes.iter_mut().zip(chunk.as_chunks::<8>().0) {
                *lane ^= u64::from_le_bytes(*word);
            }
        }
        all.fetch_xor(lanes.iter().fold(0, |all, lane| all ^ lane), Ordering::Relaxed);
    })?;
    Ok(all.into_inner())
}

/// As many bytes as a model's weights, in the same kind of memory, and threads to read them.
#[derive(Debug)]
pub struct ReadLoop {
    arena: Arena,
    pool: Pool,
}

impl ReadLoop {
    /// Makes `len` bytes.
    ///
    /// # Errors
    /// [`CpuError::Memory`], [`CpuError::Thread`], [`CpuError::Panicked`].
    pub fn new(len: usize, threads: usize) -> Result<Self, CpuError> {
        let (mut arena, pool) = (Arena::new(len, "bytes to read")?, Pool::new(threads)?);
        let writer = arena.writer();
        let filled = pool.run(&|thread| {
            // SAFETY: parts of different threads do not overlap.
            #[allow(unsafe_code, reason = "disjoint parts of one mapping")]
            let part = unsafe { writer.part(len * thread / threads.max(1)..len * (thread + 1) / threads.max(1)) };
            part.fill(0x5A);
        });
        filled.map_err(|_| CpuError::Panicked { during: "bytes to read were written" })?;
        Ok(Self { arena, pool })
    }

    /// Bytes of one pass.
    #[must_use]
    pub fn len_bytes(&self) -> usize {
        self.arena.bytes().len()
    }

    /// Reads all bytes once.
    ///
    /// # Errors
    /// [`JobPanicked`].
    pub fn run(&self) -> Result<(), JobPanicked> {
        black_box(read(&self.pool, self.arena.bytes())).map(|_| ())
    }
}

/// What multiplies in an inner loop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Multiply {
    /// Bytes into 16-bit sums: inputs of 8 bits.
    Bytes,
    /// 16-bit codes into 32-bit sums: inputs of 15 bits.
    Words,
    /// f32, fused: attention, plain weights.
    Floats,
}

/// Multiply-accumulates of one call of [`multiply`] on each thread.
pub const MULTIPLIES: usize = 1 << 22;

/// [`MULTIPLIES`] multiply-accumulates on each thread, on registers alone: the limit of products with many rows. `false` where
/// `features` has no such loop.
///
/// # Errors
/// [`JobPanicked`].
pub fn multiply(pool: &Pool, features: Features, what: Multiply) -> Result<bool, JobPanicked> {
    #[cfg(target_arch = "x86_64")]
    if features != Features::portable() {
        pool.run(&|_| {
            // SAFETY: features other than the portable ones exist only where the processor has AVX2 and FMA.
            #[allow(unsafe_code, reason = "a loop of the detected instruction set")]
            unsafe {
                match what {
                    Multiply::Bytes => avx2::bytes(MULTIPLIES),
                    Multiply::Words => avx2::words(MULTIPLIES),
                    Multiply::Floats => avx2::floats(MULTIPLIES),
                }
            }
        })?;
        return Ok(true);
    }
    let _ = (pool, features, what);
    Ok(false)
}

#[cfg(target_arch = "x86_64")]
mod avx2 {
    #![allow(unsafe_code, reason = "assembly loops on registers")]

    use std::arch::asm;

    /// Products into a temporary, added to one of six sums.
    macro_rules! integer {
        ($name:ident, $multiply:literal, $add:literal, $lanes:literal) => {
            /// # Safety
            /// The processor has AVX2.
            #[target_feature(enable = "avx2,fma")]
            pub(super) unsafe fn $name(count: usize) {
                // SAFETY: works on registers alone, all of them declared.
                unsafe {
                    asm!(
                        "2:",
                        concat!($multiply, " ymm8, ymm14, ymm15\n", $add, " ymm0, ymm0, ymm8"),
                        concat!($multiply, " ymm9, ymm14, ymm15\n", $add, " ymm1, ymm1, ymm9"),
                        concat!($multiply, " ymm10, ymm14, ymm15\n", $add, " ymm2, ymm2, ymm10"),
                        concat!($multiply, " ymm11, ymm14, ymm15\n", $add, " ymm3, ymm3, ymm11"),
                        concat!($multiply, " ymm12, ymm14, ymm15\n", $add, " ymm4, ymm4, ymm12"),
                        concat!($multiply, " ymm13, ymm14, ymm15\n", $add, " ymm5, ymm5, ymm13"),
                        "dec {n}",
                        "jnz 2b",
                        n = inout(reg) (count / (6 * $lanes)).max(1) => _,
                        out("ymm0") _, out("ymm1") _, out("ymm2") _, out("ymm3") _, out("ymm4") _, out("ymm5") _,
                        out("ymm8") _, out("ymm9") _, out("ymm10") _, out("ymm11") _, out("ymm12") _, out("ymm13") _,
                        out("ymm14") _, out("ymm15") _,
                        options(nostack, nomem),
                    );
                }
            }
        };
    }

    integer!(bytes, "vpmaddubsw", "vpaddw", 32);
    integer!(words, "vpmaddwd", "vpaddd", 16);

    /// # Safety
    /// The processor has AVX2 and FMA.
    #[target_feature(enable = "avx2,fma")]
    pub(super) unsafe fn floats(count: usize) {
        // SAFETY: works on registers alone, all of them declared; they start at zero, so that no value is denormal.
        unsafe {
            asm!(
                "vzeroall",
                "2:",
                "vfmadd231ps ymm0, ymm14, ymm15\nvfmadd231ps ymm1, ymm14, ymm15",
                "vfmadd231ps ymm2, ymm14, ymm15\nvfmadd231ps ymm3, ymm14, ymm15",
                "vfmadd231ps ymm4, ymm14, ymm15\nvfmadd231ps ymm5, ymm14, ymm15",
                "vfmadd231ps ymm6, ymm14, ymm15\nvfmadd231ps ymm7, ymm14, ymm15",
                "vfmadd231ps ymm8, ymm14, ymm15\nvfmadd231ps ymm9, ymm14, ymm15",
                "vfmadd231ps ymm10, ymm14, ymm15\nvfmadd231ps ymm11, ymm14, ymm15",
                "dec {n}",
                "jnz 2b",
                n = inout(reg) (count / (12 * 8)).max(1) => _,
                out("ymm0") _, out("ymm1") _, out("ymm2") _, out("ymm3") _, out("ymm4") _, out("ymm5") _,
                out("ymm6") _, out("ymm7") _, out("ymm8") _, out("ymm9") _, out("ymm10") _, out("ymm11") _,
                out("ymm12") _, out("ymm13") _, out("ymm14") _, out("ymm15") _,
                options(nostack, nomem),
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_read_sees_every_byte() {
        let pool = Pool::new(2).unwrap();
        let mut bytes = vec![0u8; 1024];
        assert_eq!(read(&pool, &bytes), Ok(0));
        for at in [0, 127, 511, 512, 1023] {
            bytes[at] = 1;
            assert_ne!(read(&pool, &bytes).unwrap(), 0, "byte {at}");
            bytes[at] = 0;
        }
    }

    #[test]
    fn loops_run() {
        let pool = Pool::new(2).unwrap();
        assert_eq!(multiply(&pool, Features::portable(), Multiply::Bytes), Ok(false));
        if let Some(features) = Features::avx2() {
            for what in [Multiply::Bytes, Multiply::Words, Multiply::Floats] {
                assert_eq!(multiply(&pool, features, what), Ok(true));
            }
        }
        let all = ReadLoop::new(5 << 20, 2).unwrap();
        assert_eq!((all.len_bytes(), all.run()), (5 << 20, Ok(())));
    }
}

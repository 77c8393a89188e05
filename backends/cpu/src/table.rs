//! The kernels of one instruction set, as a table of function pointers.

use crate::activations::{BLOCK, ByteBlock, SplitBlock, WideBlock};
use crate::attention::{self, ChunkJob};
use crate::gemm::{self, PanelJob};
use crate::gemv::{self, GemvJob};
use crate::{activations, elementwise};
use npuhal_models::WeightType;

#[cfg(target_arch = "x86_64")]
use crate::vnni;

/// Product of a run of groups with one to eight input rows.
///
/// # Safety
/// The processor has the kernel's instructions; the job's pointers cover its groups, its input rows and their results.
pub type GemvKernel = unsafe fn(&GemvJob);
/// Product of one panel of groups with many input rows.
pub type PanelKernel = unsafe fn(&PanelJob<'_>, &mut [u8]);
/// Attention of some query heads over one page of the KV cache.
pub type ChunkKernel = unsafe fn(&ChunkJob);

/// One entry a kernel; chosen once, by [`crate::features::Features`]. A table is only reachable where the processor has its
/// instructions.
pub struct KernelTable {
    pub(crate) name: &'static str,
    pub(crate) gemv: fn(WeightType) -> GemvKernel,
    pub(crate) panel: fn(WeightType) -> PanelKernel,
    /// For inputs of 8 bits, of the types that take them.
    pub(crate) byte_gemv: fn(WeightType) -> GemvKernel,
    /// For inputs of 8 bits, of the types that take them.
    pub(crate) byte_panel: fn(WeightType) -> PanelKernel,
    pub(crate) chunk: ChunkKernel,
    quantize_split: unsafe fn(&[f32], &mut [SplitBlock]),
    quantize_wide: unsafe fn(&[f32], &mut [WideBlock]),
    quantize_byte: unsafe fn(&[f32], &mut [ByteBlock]),
    swiglu: unsafe fn(&mut [f32], &[f32]),
    geglu: unsafe fn(&mut [f32], &[f32]),
    rms_norm: unsafe fn(&[f32], &[f32], f32, &mut [f32]),
}

pub(crate) static PORTABLE: KernelTable = KernelTable {
    name: "portable",
    gemv: gemv::portable::kernel,
    panel: gemm::portable::kernel,
    byte_gemv: gemv::portable::byte_kernel,
    byte_panel: gemm::portable::byte_kernel,
    chunk: attention::portable::chunk,
    quantize_split: activations::portable::quantize_split,
    quantize_wide: activations::portable::quantize_wide,
    quantize_byte: activations::portable::quantize_byte,
    swiglu: elementwise::swiglu,
    geglu: elementwise::geglu,
    rms_norm: elementwise::rms_norm,
};

#[cfg(target_arch = "x86_64")]
pub(crate) static AVX2: KernelTable = AVX2_KERNELS;

#[cfg(target_arch = "x86_64")]
const AVX2_KERNELS: KernelTable = KernelTable {
    name: "avx2",
    gemv: gemv::avx2::kernel,
    panel: gemm::avx2::kernel,
    byte_gemv: gemv::bytes::byte_kernel,
    byte_panel: gemm::bytes::byte_kernel,
    chunk: attention::avx2::chunk,
    quantize_split: activations::avx2::quantize_split,
    quantize_wide: activations::avx2::quantize_wide,
    quantize_byte: activations::avx2::quantize_byte,
    swiglu: elementwise::avx2::swiglu,
    geglu: elementwise::avx2::geglu,
    rms_norm: elementwise::avx2::rms_norm,
};

/// The products of the VNNI kernels, the rest of AVX2.
#[cfg(target_arch = "x86_64")]
pub(crate) static AVX_VNNI: KernelTable = KernelTable {
    name: "avx-vnni",
    gemv: vnni::avx_vnni::gemv,
    panel: vnni::avx_vnni::panel,
    byte_gemv: vnni::avx_vnni::byte_gemv,
    byte_panel: vnni::avx_vnni::byte_panel,
    ..AVX2_KERNELS
};

/// The products of the VNNI kernels, the rest of AVX2.
#[cfg(target_arch = "x86_64")]
pub(crate) static AVX512_VNNI: KernelTable = KernelTable {
    name: "avx512-vnni",
    gemv: vnni::avx512_vnni::gemv,
    panel: vnni::avx512_vnni::panel,
    byte_gemv: vnni::avx512_vnni::byte_gemv,
    byte_panel: vnni::avx512_vnni::byte_panel,
    ..AVX2_KERNELS
};

impl KernelTable {
    /// Quantizes `x` in blocks of 32; as many blocks as `out` has.
    ///
    /// # Panics
    /// When `x` is not 32 times as long as `out`.
    pub fn quantize_split(&self, x: &[f32], out: &mut [SplitBlock]) {
        assert_eq!(x.len(), out.len() * BLOCK);
        // SAFETY: lengths fit (checked above); the table is reachable only where its instructions exist.
        #[allow(unsafe_code, reason = "kernels of the detected instruction set")]
        unsafe {
            (self.quantize_split)(x, out);
        }
    }

    /// Quantizes `x` in blocks of 32; as many blocks as `out` has.
    ///
    /// # Panics
    /// When `x` is not 32 times as long as `out`.
    pub fn quantize_wide(&self, x: &[f32], out: &mut [WideBlock]) {
        assert_eq!(x.len(), out.len() * BLOCK);
        // SAFETY: as in `quantize_split`.
        #[allow(unsafe_code, reason = "kernels of the detected instruction set")]
        unsafe {
            (self.quantize_wide)(x, out);
        }
    }

    /// Quantizes `x` in blocks of 32; as many blocks as `out` has.
    ///
    /// # Panics
    /// When `x` is not 32 times as long as `out`.
    pub fn quantize_byte(&self, x: &[f32], out: &mut [ByteBlock]) {
        assert_eq!(x.len(), out.len() * BLOCK);
        // SAFETY: as in `quantize_split`.
        #[allow(unsafe_code, reason = "kernels of the detected instruction set")]
        unsafe {
            (self.quantize_byte)(x, out);
        }
    }

    /// `gate = silu(gate) × up`.
    ///
    /// # Panics
    /// When lengths differ.
    pub fn swiglu(&self, gate: &mut [f32], up: &[f32]) {
        assert_eq!(gate.len(), up.len());
        // SAFETY: as in `quantize_split`.
        #[allow(unsafe_code, reason = "kernels of the detected instruction set")]
        unsafe {
            (self.swiglu)(gate, up);
        }
    }

    /// `gate = gelu(gate) × up`, as [`elementwise::geglu`].
    ///
    /// # Panics
    /// When lengths differ.
    pub fn geglu(&self, gate: &mut [f32], up: &[f32]) {
        assert_eq!(gate.len(), up.len());
        // SAFETY: as in `quantize_split`.
        #[allow(unsafe_code, reason = "kernels of the detected instruction set")]
        unsafe {
            (self.geglu)(gate, up);
        }
    }

    /// `out = x / sqrt(mean(x²) + eps) × weight`.
    ///
    /// # Panics
    /// When lengths differ.
    pub fn rms_norm(&self, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
        assert!(x.len() == weight.len() && x.len() == out.len());
        // SAFETY: as in `quantize_split`.
        #[allow(unsafe_code, reason = "kernels of the detected instruction set")]
        unsafe {
            (self.rms_norm)(x, weight, eps, out);
        }
    }
}

impl std::fmt::Debug for KernelTable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("KernelTable").field("name", &self.name).finish_non_exhaustive()
    }
}

//! The kernel interface in bytes: request codes, structs, parameter numbers and payloads.
//!
//! Source: the published user-space header of the `amdxdna` driver and the generic DRM headers. Sizes, offsets and request
//! codes are asserted at compile time. All integers are in the byte order of the machine, which must be little-endian.

#[cfg(not(target_endian = "little"))]
compile_error!("the amdxdna interface is little-endian");

use std::mem::{offset_of, size_of};

const IOC_WRITE: u32 = 1;
const IOC_READ: u32 = 2;
const DRM_TYPE: u32 = b'd' as u32;
const AMDXDNA_BASE: u32 = 0x40;

const fn request(direction: u32, number: u32, size_bytes: usize) -> u32 {
    (direction << 30) | ((size_bytes as u32) << 16) | (DRM_TYPE << 8) | number
}

const fn amdxdna<T>(number: u32) -> u32 {
    request(IOC_READ | IOC_WRITE, AMDXDNA_BASE + number, size_of::<T>())
}

const fn drm<T>(number: u32) -> u32 {
    request(IOC_READ | IOC_WRITE, number, size_of::<T>())
}

/// Declares a struct of the interface and asserts its size and the offset of every field.
macro_rules! layout {
    ($(#[$doc:meta])* $name:ident, $size:literal, { $($(#[$field_doc:meta])* $field:ident : $type:ty = $offset:literal,)* }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
        #[repr(C)]
        #[allow(missing_docs, reason = "field names and meaning are those of the published header")]
        pub struct $name { $($(#[$field_doc])* pub $field: $type,)* }

        const _: () = {
            assert!(size_of::<$name>() == $size);
            $(assert!(offset_of!($name, $field) == $offset);)*
        };
    };
}

layout!(/// `struct drm_version`.
DrmVersion, 64, {
    version_major: i32 = 0, version_minor: i32 = 4, patch: i32 = 8, pad: u32 = 12, name_len: u64 = 16, name: u64 = 24,
    date_len: u64 = 32, date: u64 = 40, desc_len: u64 = 48, desc: u64 = 56,
});
layout!(/// `struct drm_gem_close`.
GemClose, 8, { handle: u32 = 0, pad: u32 = 4, });
layout!(/// `struct drm_prime_handle`.
PrimeHandle, 12, { handle: u32 = 0, flags: u32 = 4, fd: i32 = 8, });
layout!(/// `struct drm_syncobj_destroy`.
SyncobjDestroy, 8, { handle: u32 = 0, pad: u32 = 4, });
layout!(/// `struct drm_syncobj_timeline_wait` without the deadline extension.
TimelineWait, 40, {
    handles: u64 = 0, points: u64 = 8, timeout_nsec: i64 = 16, count_handles: u32 = 24, flags: u32 = 28,
    first_signaled: u32 = 32, pad: u32 = 36,
});
layout!(/// `struct amdxdna_qos_info` in its longer form; the mainline driver reads the first 24 bytes.
QosInfo, 32, {
    gops: u32 = 0, fps: u32 = 4, dma_bandwidth: u32 = 8, latency: u32 = 12, frame_exec_time: u32 = 16, priority: u32 = 20,
    user_start_col: u32 = 24, reserved: u32 = 28,
});
layout!(/// `struct amdxdna_drm_create_hwctx`.
CreateHwctx, 56, {
    ext: u64 = 0, ext_flags: u64 = 8, qos_p: u64 = 16, umq_bo: u32 = 24, log_buf_bo: u32 = 28, max_opc: u32 = 32,
    num_tiles: u32 = 36, mem_size: u32 = 40, umq_doorbell: u32 = 44, handle: u32 = 48, syncobj_handle: u32 = 52,
});
layout!(/// `struct amdxdna_drm_destroy_hwctx`.
DestroyHwctx, 8, { handle: u32 = 0, pad: u32 = 4, });
layout!(/// `struct amdxdna_drm_config_hwctx`.
ConfigHwctx, 24, { handle: u32 = 0, param_type: u32 = 4, param_val: u64 = 8, param_val_size: u32 = 16, pad: u32 = 20, });
layout!(/// `struct amdxdna_cu_config`: one entry of a CONFIG_CU value.
CuConfigEntry, 8, { cu_bo: u32 = 0, cu_func: u8 = 4, pad: [u8; 3] = 5, });
layout!(/// `struct amdxdna_drm_create_bo`.
CreateBo, 32, { flags: u64 = 0, vaddr: u64 = 8, size: u64 = 16, kind: u32 = 24, handle: u32 = 28, });
layout!(/// `struct amdxdna_drm_va_tbl` with one entry.
VaTable, 24, { dmabuf_fd: i32 = 0, num_entries: u32 = 4, vaddr: u64 = 8, len: u64 = 16, });
layout!(/// `struct amdxdna_drm_get_bo_info`.
GetBoInfo, 48, {
    ext: u64 = 0, ext_flags: u64 = 8, handle: u32 = 16, pad: u32 = 20, map_offset: u64 = 24, vaddr: u64 = 32,
    xdna_addr: u64 = 40,
});
layout!(/// `struct amdxdna_drm_sync_bo`.
SyncBo, 24, { handle: u32 = 0, direction: u32 = 4, offset: u64 = 8, size: u64 = 16, });
layout!(/// `struct amdxdna_drm_exec_cmd`.
ExecCmd, 56, {
    ext: u64 = 0, ext_flags: u64 = 8, hwctx: u32 = 16, kind: u32 = 20, cmd_handles: u64 = 24, args: u64 = 32,
    cmd_count: u32 = 40, arg_count: u32 = 44, seq: u64 = 48,
});
layout!(/// `struct amdxdna_drm_get_info`; SET_STATE has the same shape.
GetInfo, 16, { param: u32 = 0, buffer_size: u32 = 4, buffer: u64 = 8, });
layout!(/// `struct amdxdna_drm_get_array`.
GetArray, 24, { param: u32 = 0, element_size: u32 = 4, num_element: u32 = 8, pad: u32 = 12, buffer: u64 = 16, });

/// `CREATE_HWCTX`.
pub const CREATE_HWCTX: u32 = amdxdna::<CreateHwctx>(0);
/// `DESTROY_HWCTX`.
pub const DESTROY_HWCTX: u32 = amdxdna::<DestroyHwctx>(1);
/// `CONFIG_HWCTX`.
pub const CONFIG_HWCTX: u32 = amdxdna::<ConfigHwctx>(2);
/// `CREATE_BO`.
pub const CREATE_BO: u32 = amdxdna::<CreateBo>(3);
/// `GET_BO_INFO`.
pub const GET_BO_INFO: u32 = amdxdna::<GetBoInfo>(4);
/// `SYNC_BO`.
pub const SYNC_BO: u32 = amdxdna::<SyncBo>(5);
/// `EXEC_CMD`.
pub const EXEC_CMD: u32 = amdxdna::<ExecCmd>(6);
/// `GET_INFO`.
pub const GET_INFO: u32 = amdxdna::<GetInfo>(7);
/// `GET_ARRAY`.
pub const GET_ARRAY: u32 = amdxdna::<GetArray>(10);
/// `DRM_IOCTL_VERSION`.
pub const VERSION: u32 = drm::<DrmVersion>(0x00);
/// `DRM_IOCTL_GEM_CLOSE`.
pub const GEM_CLOSE: u32 = request(IOC_WRITE, 0x09, size_of::<GemClose>());
/// `DRM_IOCTL_PRIME_HANDLE_TO_FD`.
pub const PRIME_HANDLE_TO_FD: u32 = drm::<PrimeHandle>(0x2D);
/// `DRM_IOCTL_PRIME_FD_TO_HANDLE`.
pub const PRIME_FD_TO_HANDLE: u32 = drm::<PrimeHandle>(0x2E);
/// `DRM_IOCTL_SYNCOBJ_DESTROY`.
pub const SYNCOBJ_DESTROY: u32 = drm::<SyncobjDestroy>(0xC0);
/// `DRM_IOCTL_SYNCOBJ_TIMELINE_WAIT`, 40-byte form.
pub const SYNCOBJ_TIMELINE_WAIT: u32 = drm::<TimelineWait>(0xCA);

const _: () = {
    assert!(CREATE_HWCTX == 0xC038_6440);
    assert!(DESTROY_HWCTX == 0xC008_6441);
    assert!(CONFIG_HWCTX == 0xC018_6442);
    assert!(CREATE_BO == 0xC020_6443);
    assert!(GET_BO_INFO == 0xC030_6444);
    assert!(SYNC_BO == 0xC018_6445);
    assert!(EXEC_CMD == 0xC038_6446);
    assert!(GET_INFO == 0xC010_6447);
    assert!(GET_ARRAY == 0xC018_644A);
    assert!(VERSION == 0xC040_6400);
    assert!(GEM_CLOSE == 0x4008_6409);
    assert!(PRIME_HANDLE_TO_FD == 0xC00C_642D);
    assert!(PRIME_FD_TO_HANDLE == 0xC00C_642E);
    assert!(SYNCOBJ_DESTROY == 0xC008_64C0);
    assert!(SYNCOBJ_TIMELINE_WAIT == 0xC028_64CA);
};

/// `CONFIG_HWCTX` parameter: compute units.
pub const CONFIG_CU: u32 = 0;
/// Largest value of `CONFIG_CU` in bytes.
pub const CONFIG_CU_MAX_BYTES: usize = 4096;
/// Largest number of compute units of a context.
pub const CONFIG_CU_MAX_UNITS: usize = 32;
/// `EXEC_CMD` type: submit a command.
pub const SUBMIT_EXEC_BUF: u32 = 0;
/// Largest number of argument handles of one submission.
pub const EXEC_MAX_ARGS: usize = 4095;
/// Timeline wait flag: wait for the point to be submitted first.
pub const WAIT_FOR_SUBMIT: u32 = 2;
/// Value of an address or offset that does not exist.
pub const INVALID_ADDRESS: u64 = u64::MAX;

/// Parameters of `GET_INFO`, and their payloads.
pub mod query {
    use std::mem::{offset_of, size_of};

    /// Rows, columns and tiles of the array: [`AieMetadata`].
    pub const AIE_METADATA: u32 = 1;
    /// Version of the array: two words.
    pub const AIE_VERSION: u32 = 2;
    /// Clocks.
    pub const CLOCK_METADATA: u32 = 3;
    /// Sensors.
    pub const SENSORS: u32 = 4;
    /// Hardware contexts.
    pub const HW_CONTEXTS: u32 = 5;
    /// Firmware version: four words.
    pub const FIRMWARE_VERSION: u32 = 8;
    /// Power mode.
    pub const GET_POWER_MODE: u32 = 9;
    /// Telemetry.
    pub const TELEMETRY: u32 = 10;
    /// Resources: five double words.
    pub const RESOURCE_INFO: u32 = 12;

    layout!(/// Tiles of one kind.
    TileMetadata, 16, {
        row_count: u16 = 0, row_start: u16 = 2, dma_channel_count: u16 = 4, lock_count: u16 = 6, event_reg_count: u16 = 8,
        pad: [u16; 3] = 10,
    });
    layout!(/// Payload of [`AIE_METADATA`].
    AieMetadata, 64, {
        col_size: u32 = 0, cols: u16 = 4, rows: u16 = 6, version_major: u32 = 8, version_minor: u32 = 12,
        core: TileMetadata = 16, mem: TileMetadata = 32, shim: TileMetadata = 48,
    });

    impl AieMetadata {
        /// Size of the payload.
        pub const LEN_BYTES: usize = 64;

        /// Reads the payload; `None` when it is too short.
        #[must_use]
        pub fn decode(bytes: &[u8]) -> Option<Self> {
            bytemuck::try_pod_read_unaligned(bytes.get(..Self::LEN_BYTES)?).ok()
        }

        /// Writes the payload.
        #[must_use]
        pub fn encode(&self) -> [u8; Self::LEN_BYTES] {
            bytemuck::cast(*self)
        }
    }

    /// Payload of [`FIRMWARE_VERSION`]: major, minor, patch, build.
    #[must_use]
    pub fn decode_firmware_version(bytes: &[u8]) -> Option<[u32; 4]> {
        bytemuck::try_pod_read_unaligned(bytes.get(..16)?).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::query::{AieMetadata, TileMetadata, decode_firmware_version};

    #[test]
    fn metadata_round_trips() {
        let metadata = AieMetadata {
            col_size: 0x0200_0000,
            cols: 5,
            rows: 6,
            version_major: 2,
            version_minor: 0,
            core: TileMetadata {
                row_count: 4,
                row_start: 2,
                dma_channel_count: 2,
                lock_count: 16,
                ..Default::default()
            },
            mem: TileMetadata {
                row_count: 1,
                row_start: 1,
                dma_channel_count: 6,
                lock_count: 64,
                ..Default::default()
            },
            shim: TileMetadata {
                row_count: 1,
                row_start: 0,
                dma_channel_count: 2,
                lock_count: 16,
                ..Default::default()
            },
        };
        assert_eq!(AieMetadata::decode(&metadata.encode()), Some(metadata));
        assert_eq!(AieMetadata::decode(&[0; 63]), None);
        assert_eq!(decode_firmware_version(&[1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0, 0, 1, 0, 0]), Some([1, 2, 3, 256]));
        assert_eq!(decode_firmware_version(&[0; 15]), None);
    }
}

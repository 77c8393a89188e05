//! What an error number means for an operation, and what to do about it.

use crate::errno::Errno;
use npuhal_core::DeviceError;

/// Operations of the client, in the granularity in which error numbers change their meaning.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Operation {
    /// Opening the node.
    Open,
    /// Asking for the driver's version.
    Version,
    /// `GET_INFO` or `GET_ARRAY`.
    Query,
    /// Creating the device heap.
    CreateHeap,
    /// Adding a chunk to the device heap.
    GrowHeap,
    /// Allocating inside the device heap.
    AllocateDevice,
    /// Allocating host pages, for tensors or command packets.
    AllocateHost,
    /// Turning the process's own pages into a buffer object.
    AdoptMemory,
    /// Asking for the addresses of a buffer object.
    BufferInfo,
    /// Mapping a buffer object.
    Map,
    /// Exporting as dma-buf.
    Export,
    /// Importing a dma-buf.
    Import,
    /// Creating a hardware context.
    CreateContext,
    /// Configuring the compute units of a context.
    ConfigureUnits,
    /// Destroying a context or its synchronisation object.
    DestroyContext,
    /// Closing a buffer object.
    Close,
    /// Submitting a command.
    Submit,
    /// Waiting for a command.
    Wait,
}

impl Operation {
    /// Every operation.
    pub const ALL: [Self; 18] = [
        Self::Open,
        Self::Version,
        Self::Query,
        Self::CreateHeap,
        Self::GrowHeap,
        Self::AllocateDevice,
        Self::AllocateHost,
        Self::AdoptMemory,
        Self::BufferInfo,
        Self::Map,
        Self::Export,
        Self::Import,
        Self::CreateContext,
        Self::ConfigureUnits,
        Self::DestroyContext,
        Self::Close,
        Self::Submit,
        Self::Wait,
    ];

    /// The operation in words, for the start of a sentence.
    #[must_use]
    pub const fn words(self) -> &'static str {
        match self {
            Self::Open => "opening the NPU's device node",
            Self::Version => "asking the driver for its version",
            Self::Query => "asking the driver for information",
            Self::CreateHeap => "creating the device heap",
            Self::GrowHeap => "growing the device heap",
            Self::AllocateDevice => "allocating device memory",
            Self::AllocateHost => "allocating host memory for the device",
            Self::AdoptMemory => "lending host memory to the device",
            Self::BufferInfo => "asking for a buffer's address",
            Self::Map => "mapping a buffer",
            Self::Export => "exporting a buffer",
            Self::Import => "importing a buffer",
            Self::CreateContext => "creating a hardware context",
            Self::ConfigureUnits => "configuring the compute units",
            Self::DestroyContext => "destroying a hardware context",
            Self::Close => "closing a buffer",
            Self::Submit => "submitting a command",
            Self::Wait => "waiting for a command",
        }
    }
}

/// What an error number means for an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Explanation {
    /// The meaning.
    pub meaning: &'static str,
    /// What to do; may be empty where nothing helps.
    pub remedy: &'static str,
}

const BUG: &str = "this is a defect of npuhal or of the driver; please report it with this message";
const DOCTOR: &str = "run `npuhal doctor`";
const RELOAD: &str = "see `sudo dmesg | grep amdxdna`, then `sudo modprobe -r amdxdna && sudo modprobe amdxdna`";
const MEMLOCK: &str =
    "raise the limit of locked memory: `ulimit -l unlimited`, or `memlock` in /etc/security/limits.conf";
const UPDATE: &str = "update the amdxdna driver and the NPU firmware";

/// Explains `errno` of `operation`. Every pair has a meaning.
#[must_use]
pub fn explain(operation: Operation, errno: Errno) -> Explanation {
    use Operation as Op;
    let (meaning, remedy) = match (operation, errno) {
        (Op::Open, Errno::EACCES | Errno::EPERM) => (
            "no permission to open the node",
            "join the group that owns it (`sudo usermod -aG render $USER`) and log in again",
        ),
        (Op::Open, Errno::ENOENT) => ("there is no such node", "load the driver: `sudo modprobe amdxdna`"),
        (Op::Open, Errno::EINVAL | Errno::ENODEV | Errno::ENOSPC) => (
            "the process's memory cannot be shared with the device (SVA)",
            "switch the IOMMU on in the BIOS and boot without `amd_iommu=off`; it does not work inside a virtual machine",
        ),
        (Op::Open, Errno::EBUSY) => ("the device is in use exclusively", "close the other NPU program"),
        (Op::Open, Errno::EOPNOTSUPP) => ("this processor cannot flush its caches from user space", ""),
        (_, Errno::ENODEV) if operation != Op::CreateContext => {
            ("the device is gone: it was removed, reset or its driver was unloaded", RELOAD)
        }
        (Op::Version, Errno::ENOTTY | Errno::EINVAL) => ("the node does not belong to a DRM driver", DOCTOR),
        (Op::Query, Errno::EOPNOTSUPP | Errno::EINVAL | Errno::ENOTTY) => {
            ("this driver or firmware does not know the question", UPDATE)
        }
        (Op::Query, Errno::ENOSPC) => ("the answer is larger than the space given", BUG),
        (Op::CreateHeap, Errno::EBUSY) => ("the file has a device heap already", BUG),
        (Op::CreateHeap, Errno::EINVAL) => ("the driver refuses the size of the heap", UPDATE),
        (Op::GrowHeap, Errno::EOPNOTSUPP) => ("the firmware cannot grow the device heap", UPDATE),
        (Op::GrowHeap, Errno::EBUSY) => ("this driver has one device heap of a fixed size", UPDATE),
        (Op::GrowHeap | Op::AllocateDevice, Errno::ENOSPC | Errno::EAGAIN) => {
            ("the device heap is full", "close a model or another context of this process first")
        }
        (Op::AllocateDevice, Errno::EINVAL) => ("the driver refuses the size, or there is no device heap yet", BUG),
        (Op::AdoptMemory, Errno::EPERM) => ("locking memory is not allowed", MEMLOCK),
        (Op::AdoptMemory | Op::Map, Errno::ENOMEM | Errno::EAGAIN) => {
            ("the memory is used up, or would exceed the limit of locked memory", MEMLOCK)
        }
        (Op::AdoptMemory, Errno::EINVAL | Errno::EFAULT) => {
            ("the memory is not page aligned, or not readable and writable", BUG)
        }
        (Op::AllocateHost, Errno::EINVAL) => ("the driver refuses the size or type", BUG),
        (Op::Export, Errno::EOPNOTSUPP) => ("device memory cannot be exported; only host buffers can", ""),
        (Op::Import, Errno::EINVAL | Errno::ENOTTY | Errno::EBADF) => {
            ("the descriptor is not a dma-buf that this device can use", "")
        }
        (Op::CreateContext, Errno::ENOENT) => ("there is no device heap yet", BUG),
        (Op::CreateContext, Errno::ENODEV) => (
            "no free range of columns, or the device is gone",
            "close other NPU programs; if none is running, see `sudo dmesg | grep amdxdna`",
        ),
        (Op::CreateContext, Errno::ENOSPC | Errno::EAGAIN | Errno::EBUSY | Errno::E2BIG) => {
            ("all hardware contexts or all columns are taken", "close a model or another NPU program first")
        }
        (Op::CreateContext, Errno::EINVAL) => (
            "the driver or the firmware refuses the context: more columns than exist, or too many contexts",
            "close other NPU programs; see `sudo dmesg | grep amdxdna`",
        ),
        (Op::CreateContext, Errno::EEXIST) => ("the driver's context number is taken", RELOAD),
        // Published for npu1: with six contexts in use the seventh ends in ETIMEDOUT.
        (Op::CreateContext, Errno::ETIME | Errno::ETIMEDOUT) => (
            "the firmware did not answer: all its hardware contexts are in use (6 on npu1, 16 on npu4 to npu6, over all \
             programs), or it hangs",
            "close a model or another NPU program first; if none is running: `sudo dmesg | grep amdxdna`, then \
             `sudo modprobe -r amdxdna && sudo modprobe amdxdna`",
        ),
        (Op::CreateContext, Errno::EIO) => ("the firmware does not answer", RELOAD),
        (Op::ConfigureUnits, Errno::E2BIG) => ("more compute units than the driver accepts", ""),
        (Op::ConfigureUnits, Errno::EINVAL) => {
            ("unknown context, units configured already, or a configuration that is not in device memory", BUG)
        }
        (Op::ConfigureUnits | Op::Submit, Errno::EOPNOTSUPP) => ("the driver does not know this request", UPDATE),
        (Op::Submit, Errno::EINVAL) => {
            ("the driver refuses the command: unknown context, command buffer or inconsistent chain", BUG)
        }
        (Op::Submit, Errno::ENOENT) => {
            ("a buffer of the command is unknown to the driver, or the context was evicted", "open a new context")
        }
        (Op::Wait, Errno::ETIME) => ("the deadline passed", ""),
        (Op::Wait, Errno::ENOENT | Errno::EINVAL) => {
            ("the context's synchronisation object is gone", "open a new context")
        }
        (Op::DestroyContext | Op::Close | Op::BufferInfo | Op::Export, Errno::EINVAL | Errno::ENOENT) => {
            ("the driver does not know the handle", BUG)
        }
        (_, Errno::ENOMEM) => ("no memory left", "close other programs"),
        (_, Errno::EFAULT) => ("the driver cannot access the argument", BUG),
        (_, Errno::EINTR | Errno::EAGAIN) => ("interrupted again and again", "try again"),
        (_, Errno::EMFILE | Errno::ENFILE) => ("too many open files", "raise the limit: `ulimit -n`"),
        (_, Errno::EACCES | Errno::EPERM) => ("not permitted", DOCTOR),
        (_, Errno::EOPNOTSUPP | Errno::ENOTTY | Errno::ENOSYS) => ("the driver does not know this request", UPDATE),
        (_, Errno::ETIME | Errno::ETIMEDOUT | Errno::EIO) => ("the firmware does not answer", RELOAD),
        (_, Errno::ECANCELED) => ("cancelled by the driver", "open a new context"),
        (_, Errno::EINVAL) => ("the driver refuses an argument", BUG),
        _ => ("an answer that the interface does not define", BUG),
    };
    Explanation { meaning, remedy }
}

/// `errno` of `operation` as an error for people.
#[must_use]
pub fn driver_error(operation: Operation, errno: Errno) -> DeviceError {
    let Explanation { meaning, remedy } = explain(operation, errno);
    DeviceError::Driver {
        operation: operation.words().to_owned(),
        code: errno.name(),
        meaning: meaning.to_owned(),
        remedy: remedy.to_owned(),
    }
}

/// Repeats `call` while it asks to be repeated, as the interface wants; gives up after [`MAX_RETRIES`] times.
///
/// Not for buffer creation, where `EAGAIN` has a meaning of its own ([`retry_interrupted`]).
pub(crate) fn retry<T>(mut call: impl FnMut() -> Result<T, Errno>) -> Result<T, Errno> {
    repeat(&mut call, Errno::is_retry)
}

/// Repeats `call` while it is interrupted.
pub(crate) fn retry_interrupted<T>(mut call: impl FnMut() -> Result<T, Errno>) -> Result<T, Errno> {
    repeat(&mut call, |errno| errno == Errno::EINTR)
}

/// How often a call is repeated before its error counts.
pub(crate) const MAX_RETRIES: u32 = 10_000;

fn repeat<T>(call: &mut impl FnMut() -> Result<T, Errno>, again: impl Fn(Errno) -> bool) -> Result<T, Errno> {
    for _ in 0..MAX_RETRIES {
        match call() {
            Err(errno) if again(errno) => std::thread::yield_now(),
            result => return result,
        }
    }
    call()
}

#[cfg(test)]
mod tests {
    use super::{Operation, driver_error, explain, retry, retry_interrupted};
    use crate::errno::Errno;

    /// The error numbers that the interface's pages name for an operation are explained, not put down as unknown.
    #[test]
    fn every_error_number_of_the_interface_has_a_meaning() {
        use Errno as E;
        use Operation as Op;
        let general = [E::EFAULT, E::EINTR, E::EINVAL, E::ENODEV, E::ENOMEM, E::EOPNOTSUPP, E::EACCES, E::EPERM];
        let own: [(Op, &[Errno]); 6] = [
            (Op::Open, &[E::ENOENT, E::ENOSPC, E::EBUSY, E::EMFILE]),
            (Op::GrowHeap, &[E::EBUSY, E::ENOSPC, E::EAGAIN]),
            (Op::CreateContext, &[E::ENOENT, E::ENOSPC, E::EEXIST, E::ETIME, E::ETIMEDOUT, E::EIO, E::E2BIG]),
            (Op::ConfigureUnits, &[E::E2BIG]),
            (Op::Submit, &[E::ENOENT]),
            (Op::Wait, &[E::ETIME, E::ENOENT, E::ECANCELED]),
        ];
        let unknown = explain(Op::Submit, Errno::from_raw(4095));
        assert!(unknown.meaning.contains("does not define"));
        for operation in Op::ALL {
            let own = own.iter().filter(|(of, _)| *of == operation).flat_map(|(_, errnos)| errnos.iter());
            for errno in general.iter().chain(own) {
                assert_ne!(explain(operation, *errno), unknown, "{operation:?} {errno}");
            }
        }
    }

    #[test]
    fn the_same_number_means_different_things() {
        let meaning = |operation, errno| explain(operation, errno).meaning;
        assert!(meaning(Operation::Open, Errno::EINVAL).contains("SVA"));
        assert!(meaning(Operation::Open, Errno::ENOSPC).contains("SVA"));
        assert!(meaning(Operation::AllocateDevice, Errno::ENOSPC).contains("heap is full"));
        assert!(meaning(Operation::AllocateDevice, Errno::EAGAIN).contains("heap is full"));
        assert!(meaning(Operation::CreateContext, Errno::ENOENT).contains("no device heap"));
        assert!(meaning(Operation::Submit, Errno::ENOENT).contains("buffer of the command"));
        assert!(meaning(Operation::CreateContext, Errno::ENODEV).contains("columns"));
        for errno in [Errno::ETIMEDOUT, Errno::ETIME, Errno::EAGAIN, Errno::EBUSY, Errno::ENOSPC] {
            let explanation = explain(Operation::CreateContext, errno);
            assert!(explanation.meaning.contains("hardware contexts"), "{errno}: {}", explanation.meaning);
            assert!(explanation.remedy.contains("close a model or another NPU program"), "{errno}");
        }
        assert!(explain(Operation::CreateContext, Errno::ETIMEDOUT).remedy.contains("modprobe"));
        assert!(!meaning(Operation::Wait, Errno::ETIMEDOUT).contains("hardware contexts"));
        assert!(meaning(Operation::Submit, Errno::ENODEV).contains("gone"));
        assert!(meaning(Operation::ConfigureUnits, Errno::E2BIG).contains("more compute units"));
        assert!(meaning(Operation::Export, Errno::EOPNOTSUPP).contains("cannot be exported"));
        assert!(meaning(Operation::Wait, Errno::ETIME).contains("deadline"));
        assert!(explain(Operation::AdoptMemory, Errno::EPERM).remedy.contains("ulimit -l"));
        assert!(explain(Operation::Open, Errno::EACCES).remedy.contains("usermod"));
    }

    #[test]
    fn messages_name_operation_meaning_code_and_remedy() {
        let message = driver_error(Operation::GrowHeap, Errno::EOPNOTSUPP).to_string();
        assert_eq!(
            message,
            "growing the device heap failed: the firmware cannot grow the device heap (EOPNOTSUPP); update the amdxdna \
             driver and the NPU firmware"
        );
    }

    #[test]
    fn retries_end() {
        let mut calls = 0;
        let result: Result<(), _> = retry(|| {
            calls += 1;
            Err(Errno::EINTR)
        });
        assert_eq!((result, calls), (Err(Errno::EINTR), super::MAX_RETRIES + 1));
        assert_eq!(retry_interrupted(|| Err::<(), _>(Errno::EAGAIN)), Err(Errno::EAGAIN));
        let mut left = 3;
        let result = retry(|| {
            left -= 1;
            if left == 0 { Ok(left) } else { Err(Errno::EAGAIN) }
        });
        assert_eq!(result, Ok(0));
    }
}

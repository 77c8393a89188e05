//! Builtin kernels of the level-1 device.

use crate::device::CpuBuffer;
use npuhal_core::device::{Arg, ArgKind, ArgSpec, BufferRef, Direction, Kernel};
use npuhal_core::error::DeviceError;
use std::any::Any;
use std::sync::Arc;

/// A kernel that the CPU device carries itself.
pub(crate) struct Builtin {
    pub(crate) name: &'static str,
    signature: fn() -> Vec<ArgSpec>,
    /// Checks what one argument alone cannot tell; `Err` is the argument's index, what was wanted and found.
    check: fn(&Args<'_>) -> Checked,
    run: fn(&Args<'_>) -> Result<(), DeviceError>,
}

/// All builtin kernels.
pub(crate) static BUILTINS: [Builtin; 4] = [
    Builtin { name: "copy", signature: in_out, check: check_same_len, run: copy },
    Builtin { name: "negate-f32", signature: in_out, check: check_floats, run: negate },
    Builtin { name: "vector-scale", signature: scale_signature, check: check_scale, run: scale },
    Builtin { name: "gemv-f32", signature: gemv_signature, check: check_gemv, run: gemv },
];

/// Names of all builtin kernels, for messages.
pub(crate) fn builtin_names() -> String {
    BUILTINS.iter().map(|builtin| builtin.name).collect::<Vec<_>>().join(", ")
}

/// A builtin kernel, loaded into a context.
#[derive(Clone)]
pub(crate) struct CpuKernel {
    builtin: &'static Builtin,
    signature: Arc<[ArgSpec]>,
    context: u64,
}

impl CpuKernel {
    pub(crate) fn load(name: &str, context: u64) -> Option<Self> {
        let builtin = BUILTINS.iter().find(|builtin| builtin.name == name)?;
        Some(Self { builtin, signature: (builtin.signature)().into(), context })
    }

    /// The context it was loaded into.
    pub(crate) fn context(&self) -> u64 {
        self.context
    }

    /// Checks `args` against the signature, and against each other.
    pub(crate) fn check(&self, args: &[Arg]) -> Result<(), DeviceError> {
        if args.len() != self.signature.len() {
            let (wanted, found) = (self.signature.len(), args.len());
            return Err(self.refuse(wanted.min(found), format!("{wanted} arguments"), format!("{found} arguments")));
        }
        for (index, (arg, spec)) in args.iter().zip(&*self.signature).enumerate() {
            self.check_one(index, arg, spec)?;
        }
        (self.builtin.check)(&Args(args)).map_err(|(index, wanted, found)| self.refuse(index, wanted, found))
    }

    /// Runs with checked arguments.
    pub(crate) fn run(&self, args: &[Arg]) -> Result<(), DeviceError> {
        (self.builtin.run)(&Args(args))
    }

    fn check_one(&self, index: usize, arg: &Arg, spec: &ArgSpec) -> Result<(), DeviceError> {
        let found = describe(arg);
        match (spec.kind, arg) {
            (ArgKind::U32, Arg::U32(_)) | (ArgKind::U64, Arg::U64(_)) => Ok(()),
            (ArgKind::Buffer { min_bytes, .. }, Arg::Buffer(buffer)) => {
                if !buffer.object().as_any().is::<CpuBuffer>() {
                    return Err(self.refuse(
                        index,
                        "a buffer of this device".to_owned(),
                        "a foreign buffer".to_owned(),
                    ));
                }
                if buffer.len_bytes() < min_bytes {
                    let wanted = format!("a buffer of at least {min_bytes} bytes");
                    return Err(self.refuse(index, wanted, found));
                }
                Ok(())
            }
            (ArgKind::U32, _) => Err(self.refuse(index, "a 32-bit scalar".to_owned(), found)),
            (ArgKind::U64, _) => Err(self.refuse(index, "a 64-bit scalar".to_owned(), found)),
            _ => Err(self.refuse(index, "a buffer".to_owned(), found)),
        }
    }

    fn refuse(&self, index: usize, wanted: String, found: String) -> DeviceError {
        DeviceError::BadArgument { kernel: self.builtin.name.to_owned(), index, wanted, found }
    }
}

impl Kernel for CpuKernel {
    fn name(&self) -> &str {
        self.builtin.name
    }

    fn signature(&self) -> &[ArgSpec] {
        &self.signature
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// Arguments whose kinds were checked.
pub(crate) struct Args<'a>(&'a [Arg]);

impl Args<'_> {
    fn len_bytes(&self, index: usize) -> u64 {
        match &self.0[index] {
            Arg::Buffer(buffer) => buffer.len_bytes(),
            _ => 0,
        }
    }

    fn scalar(&self, index: usize) -> u64 {
        match &self.0[index] {
            Arg::U32(value) => u64::from(*value),
            Arg::U64(value) => *value,
            _ => 0,
        }
    }

    fn buffer(&self, index: usize) -> Result<(&CpuBuffer, &BufferRef), DeviceError> {
        let Arg::Buffer(buffer) = &self.0[index] else { return Err(unchecked()) };
        let object = buffer.object().as_any().downcast_ref().ok_or_else(unchecked)?;
        Ok((object, buffer))
    }

    fn bytes(&self, index: usize, len_bytes: u64) -> Result<Vec<u8>, DeviceError> {
        let (object, buffer) = self.buffer(index)?;
        object.device_read(buffer.offset_bytes(), len_bytes)
    }

    fn floats(&self, index: usize, len: u64) -> Result<Vec<f32>, DeviceError> {
        let bytes = self.bytes(index, len * FLOAT_BYTES)?;
        Ok(bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect())
    }

    fn put(&self, index: usize, bytes: &[u8]) -> Result<(), DeviceError> {
        let (object, buffer) = self.buffer(index)?;
        object.device_write(buffer.offset_bytes(), bytes)
    }

    fn put_floats(&self, index: usize, values: impl Iterator<Item = f32>) -> Result<(), DeviceError> {
        let bytes: Vec<u8> = values.flat_map(f32::to_le_bytes).collect();
        self.put(index, &bytes)
    }
}

const FLOAT_BYTES: u64 = size_of::<f32>() as u64;

type Checked = Result<(), (usize, String, String)>;

fn unchecked() -> DeviceError {
    DeviceError::Misuse { operation: "run", reason: "an argument is not what was checked at push".to_owned() }
}

fn describe(arg: &Arg) -> String {
    match arg {
        Arg::Buffer(buffer) => format!("a buffer of {} bytes", buffer.len_bytes()),
        Arg::U32(value) => format!("the 32-bit scalar {value}"),
        Arg::U64(value) => format!("the 64-bit scalar {value}"),
        other => format!("{other:?}"),
    }
}

fn spec(name: &str, kind: ArgKind) -> ArgSpec {
    ArgSpec { name: name.to_owned(), kind }
}

const fn input(min_bytes: u64) -> ArgKind {
    ArgKind::Buffer { direction: Direction::In, min_bytes }
}

const fn output(min_bytes: u64) -> ArgKind {
    ArgKind::Buffer { direction: Direction::Out, min_bytes }
}

fn in_out() -> Vec<ArgSpec> {
    vec![spec("in", input(1)), spec("out", output(1))]
}

fn scale_signature() -> Vec<ArgSpec> {
    vec![spec("in", input(FLOAT_BYTES)), spec("factor", input(FLOAT_BYTES)), spec("out", output(FLOAT_BYTES))]
}

fn gemv_signature() -> Vec<ArgSpec> {
    vec![
        spec("matrix", input(FLOAT_BYTES)),
        spec("x", input(FLOAT_BYTES)),
        spec("out", output(FLOAT_BYTES)),
        spec("rows", ArgKind::U32),
        spec("cols", ArgKind::U32),
    ]
}

fn at_least(args: &Args<'_>, index: usize, bytes: u64) -> Checked {
    if args.len_bytes(index) >= bytes {
        return Ok(());
    }
    let found = format!("a buffer of {} bytes", args.len_bytes(index));
    Err((index, format!("a buffer of at least {bytes} bytes"), found))
}

fn whole_floats(args: &Args<'_>, index: usize) -> Checked {
    if args.len_bytes(index).is_multiple_of(FLOAT_BYTES) {
        return Ok(());
    }
    Err((index, "a whole number of f32".to_owned(), format!("a buffer of {} bytes", args.len_bytes(index))))
}

fn check_same_len(args: &Args<'_>) -> Checked {
    at_least(args, 1, args.len_bytes(0))
}

fn check_floats(args: &Args<'_>) -> Checked {
    whole_floats(args, 0).and_then(|()| check_same_len(args))
}

fn check_scale(args: &Args<'_>) -> Checked {
    whole_floats(args, 0).and_then(|()| at_least(args, 2, args.len_bytes(0)))
}

fn check_gemv(args: &Args<'_>) -> Checked {
    let (rows, cols) = (args.scalar(3), args.scalar(4));
    // Both are 32-bit: rows · cols · 4 may pass 64 bits by two.
    let matrix = rows.saturating_mul(cols).saturating_mul(FLOAT_BYTES);
    at_least(args, 0, matrix)?;
    at_least(args, 1, cols * FLOAT_BYTES)?;
    at_least(args, 2, rows * FLOAT_BYTES)
}

/// `out = in`.
fn copy(args: &Args<'_>) -> Result<(), DeviceError> {
    args.put(1, &args.bytes(0, args.len_bytes(0))?)
}

/// `out = -in`.
fn negate(args: &Args<'_>) -> Result<(), DeviceError> {
    let values = args.floats(0, args.len_bytes(0) / FLOAT_BYTES)?;
    args.put_floats(1, values.into_iter().map(|x| -x))
}

/// `out = in × factor[0]`.
fn scale(args: &Args<'_>) -> Result<(), DeviceError> {
    let factor = args.floats(1, 1)?[0];
    let values = args.floats(0, args.len_bytes(0) / FLOAT_BYTES)?;
    args.put_floats(2, values.into_iter().map(|x| x * factor))
}

/// `out[row] = Σ matrix[row][col] · x[col]`, summed in f32 in ascending order of columns.
fn gemv(args: &Args<'_>) -> Result<(), DeviceError> {
    let (rows, cols) = (args.scalar(3), args.scalar(4));
    let (matrix, x) = (args.floats(0, rows * cols)?, args.floats(1, cols)?);
    let dot = |row: usize| {
        let row = &matrix[row * x.len()..(row + 1) * x.len()];
        row.iter().zip(&x).fold(0.0, |sum, (weight, x)| sum + weight * x)
    };
    args.put_floats(2, (0..rows as usize).map(dot))
}

#[cfg(test)]
mod tests {
    use crate::device::CpuDevice;
    use npuhal_core::device::{Arg, BufferRef, BufferSpec, Context, Deadline, Device, Program};
    use std::time::Duration;

    fn floats(device: &CpuDevice, values: &[f32]) -> BufferRef {
        let buffer = device.allocate(&BufferSpec::tensor(values.len() as u64 * 4, "test")).unwrap();
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        buffer.write(0, &bytes).unwrap();
        buffer
    }

    fn context(device: &CpuDevice) -> Box<dyn Context> {
        device.open_context(&Program::Builtin { name: "copy" }).unwrap()
    }

    #[test]
    fn gemv_multiplies_a_matrix_with_a_vector() {
        let device = CpuDevice::new(None);
        let (matrix, x) = (floats(&device, &[1.0, 2.0, 3.0, -1.0, 0.5, 4.0]), floats(&device, &[2.0, 4.0, -1.0]));
        let out = floats(&device, &[0.0; 2]);
        let mut context = context(&device);
        let gemv = context.load(&Program::Builtin { name: "gemv-f32" }).unwrap();
        let args = |rows, cols| {
            let [matrix, x, out] = [&matrix, &x, &out].map(|buffer| Arg::Buffer(buffer.clone()));
            [matrix, x, out, Arg::U32(rows), Arg::U32(cols)]
        };
        let mut list = context.runlist();
        list.push(&*gemv, &args(2, 3)).unwrap();
        let submission = list.submit().unwrap();
        submission.wait(Deadline::within(Duration::from_secs(10))).unwrap();
        let mut bytes = [0; 8];
        out.read(0, &mut bytes).unwrap();
        assert_eq!(bytes, [7.0f32.to_le_bytes(), (-4.0f32).to_le_bytes()].concat()[..]);

        for (rows, cols, index) in [(3, 3, 0), (1, 4, 1), (3, 2, 2), (u32::MAX, u32::MAX, 0)] {
            let error = list.push(&*gemv, &args(rows, cols)).unwrap_err().to_string();
            assert!(error.contains(&format!("argument {index}: wanted a buffer of at least")), "{error}");
        }
        let mut wrong = args(2, 3);
        wrong[3] = Arg::U64(2);
        let error = list.push(&*gemv, &wrong).unwrap_err().to_string();
        assert_eq!(error, "kernel gemv-f32, argument 3: wanted a 32-bit scalar, found the 64-bit scalar 2");
    }

    #[test]
    fn lengths_that_are_no_floats_are_refused() {
        let device = CpuDevice::new(None);
        let odd = device.allocate(&BufferSpec::tensor(7, "odd")).unwrap();
        let mut context = context(&device);
        let negate = context.load(&Program::Builtin { name: "negate-f32" }).unwrap();
        let args = [Arg::Buffer(odd.clone()), Arg::Buffer(odd)];
        let error = context.runlist().push(&*negate, &args).unwrap_err().to_string();
        assert_eq!(error, "kernel negate-f32, argument 0: wanted a whole number of f32, found a buffer of 7 bytes");
    }

    #[test]
    fn the_memory_limit_counts_what_lives() {
        let device = CpuDevice::new(Some(100));
        let first = device.allocate(&BufferSpec::tensor(60, "first")).unwrap();
        let part = first.slice(0..1).unwrap();
        drop(first);
        let error = device.allocate(&BufferSpec::tensor(41, "second")).err().map(|error| error.to_string());
        let error = error.unwrap_or_default();
        assert!(error.starts_with("cpu: no room for 41 bytes of host memory (40 bytes are left); 'second'"), "{error}");
        drop(part);
        assert!(device.allocate(&BufferSpec::tensor(100, "third")).is_ok());
    }
}

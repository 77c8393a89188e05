//! The C interface of loadable add-ons: what lies on the border between npuhal and a library it opens at run time.
//!
//! Design choices, first:
//!
//! * **One symbol.** An add-on exports [`ENTRY_SYMBOL`], a function of type [`Entry`]. It takes the host's table and returns the
//!   add-on's. Both tables start with the version of the interface and their own size, in every version.
//! * **Borrowed, never handed over.** Neither side frees what the other allocated. Text that the add-on makes at run time goes
//!   into a [`TextSink`] of the host, which copies it.
//! * **What an add-on returns from its entry lives as long as the process.** A library is never unloaded.
//! * **No unwinding over the border, in either direction.**
//!
//! The C form of these types is `include/npuhal_addon.h`; a test compiles it and compares every size and offset.
//! Authors in Rust do not use this crate but `npuhal-addon`, which makes the tables from ordinary trait implementations.

use std::ffi::c_void;

/// Version of the interface. A host takes add-ons of its own version only.
pub const ABI_VERSION: u32 = 1;

/// Name of the exported function.
pub const ENTRY_SYMBOL: &str = "npuhal_addon_entry";

/// Type of the exported function: takes the host's table, returns the add-on's, or null where it does not want to run with
/// this host.
pub type Entry = unsafe extern "C" fn(host: *const HostTable) -> *const AddonTable;

/// UTF-8 text that is not owned: `len` bytes from `data`, no final zero. Empty text may have a null pointer.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Str {
    /// First byte.
    pub data: *const u8,
    /// Bytes.
    pub len: usize,
}

impl Str {
    /// No text.
    pub const EMPTY: Self = Self { data: std::ptr::null(), len: 0 };

    /// `text`, borrowed: valid as long as `text` is.
    #[must_use]
    pub const fn new(text: &str) -> Self {
        Self { data: text.as_ptr(), len: text.len() }
    }
}

/// Takes text from the other side, which copies it. May be called several times: the pieces are joined.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct TextSink {
    /// Passed to `write`.
    pub state: *mut c_void,
    /// Takes one piece.
    pub write: Option<unsafe extern "C" fn(state: *mut c_void, text: Str)>,
}

/// A route's answer to `fitness`.
pub mod fitness {
    /// It would run the model; the service is filled in.
    pub const SERVES: i32 = 0;
    /// Not its kind of model. Silent.
    pub const NOT_MINE: i32 = 1;
    /// It would run the model but cannot now; the reason is told, unless the route is optional.
    pub const UNAVAILABLE: i32 = 2;
    /// It could not improve on the others; silent.
    pub const OPTIONAL: i32 = 3;
    /// The model cannot be run without this route: an error with the reason.
    pub const REQUIRED: i32 = 4;
    /// The add-on itself failed; the reason says how.
    pub const FAILED: i32 = 5;
}

/// How a call ended.
pub mod status {
    /// Well.
    pub const OK: i32 = 0;
    /// It failed; the error sink says how.
    pub const FAILED: i32 = 1;
    /// The host's cancellation was seen.
    pub const CANCELLED: i32 = 2;
    /// The host's deadline was seen.
    pub const DEADLINE_PASSED: i32 = 3;
    /// The device's context is lost; the error sink says how.
    pub const LOST: i32 = 4;
    /// The add-on panicked, or is in an unknown state for another reason: the session is not called again but to close it.
    pub const PANICKED: i32 = 5;
}

/// Bits of [`RouteTable::flags`].
pub mod route_flags {
    /// Where the route is unavailable the others take over without a word.
    pub const OPTIONAL: u32 = 1;
}

/// Values of [`Session::kind`].
pub mod session_kind {
    /// Token rows in, logits out.
    pub const STEPPER: u32 = 1;
    /// Prompt ids in, generated ids out.
    pub const GENERATOR: u32 = 2;
}

/// Values of [`Device::generation`].
pub mod generation {
    /// The host processor.
    pub const CPU: u32 = 0;
    /// First-generation XDNA.
    pub const XDNA1: u32 = 1;
    /// Second-generation XDNA.
    pub const XDNA2: u32 = 2;
}

/// Values of [`Service::speed`].
pub mod speed {
    /// Made for exactness, not for speed.
    pub const REFERENCE: u32 = 0;
    /// The host processor.
    pub const CPU: u32 = 1;
    /// Layers on an NPU and on the host.
    pub const HYBRID: u32 = 2;
    /// One dispatch of a whole decoder a token.
    pub const ENGINE: u32 = 3;
    /// One runlist a token.
    pub const LANE: u32 = 4;
}

/// Values of [`Service::claim`]: how the expected speed is known.
pub mod claim {
    /// Stated by somebody else.
    pub const PUBLISHED: u32 = 0;
    /// Ran on the virtual NPU.
    pub const VIRTUAL: u32 = 1;
    /// Computed from a model.
    pub const MODELLED: u32 = 2;
    /// Measured on hardware.
    pub const MEASURED: u32 = 3;
}

/// Values of [`Placement::yields`].
pub mod yields {
    /// The residual stream.
    pub const HIDDEN: u32 = 0;
    /// The residual stream after the final norm.
    pub const NORMED: u32 = 1;
    /// Logits.
    pub const LOGITS: u32 = 2;
}

/// Numbers of tensors, for [`HostTable::tensor`]. Matrices are output features × input features, row after row.
pub mod role {
    /// Token embedding.
    pub const TOKEN_EMBEDDING: u32 = 0;
    /// RMSNorm after the last layer.
    pub const FINAL_NORM: u32 = 1;
    /// Head; of a tied model the embedding.
    pub const HEAD: u32 = 2;
    /// Factors of the RoPE frequencies.
    pub const ROPE_FACTORS: u32 = 3;
    /// RMSNorm before attention; this and all below are of a layer.
    pub const INPUT_NORM: u32 = 16;
    /// Query projection.
    pub const Q: u32 = 17;
    /// Query bias.
    pub const Q_BIAS: u32 = 18;
    /// RMSNorm of each query head.
    pub const Q_NORM: u32 = 19;
    /// Key projection.
    pub const K: u32 = 20;
    /// Key bias.
    pub const K_BIAS: u32 = 21;
    /// RMSNorm of each key head.
    pub const K_NORM: u32 = 22;
    /// Value projection.
    pub const V: u32 = 23;
    /// Value bias.
    pub const V_BIAS: u32 = 24;
    /// Output projection of attention.
    pub const O: u32 = 25;
    /// RMSNorm before the feed-forward block.
    pub const POST_ATTENTION_NORM: u32 = 26;
    /// Gate projection.
    pub const GATE: u32 = 27;
    /// Up projection.
    pub const UP: u32 = 28;
    /// Down projection.
    pub const DOWN: u32 = 29;
}

/// A tensor in the host's mapping of the model file. Valid until the session that was opened with the model is closed; outside
/// a session, for the call.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Tensor {
    /// Name in the file.
    pub name: Str,
    /// Storage type as GGUF tools print it: `F32`, `F16`, `BF16`, `Q4_0`, `Q4_K`, …
    pub storage: Str,
    /// First byte.
    pub data: *const u8,
    /// Bytes.
    pub len_bytes: usize,
    /// Output features; 1 for a vector.
    pub rows: u64,
    /// Input features.
    pub cols: u64,
}

/// A model as the host has opened it. Of a model that the host cannot read, only path, type and end-of-generation ids are known:
/// all sizes are 0, `layers` too, and there are no tensors. Routes that name its type are asked all the same.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Model {
    /// Bytes of this struct.
    pub size_bytes: u32,
    /// RoPE pairs: 0 elements `2i` and `2i+1`, 1 elements `i` and `i + dims/2`.
    pub rope_pairing: u32,
    /// File or directory.
    pub path: Str,
    /// Model type, the key of route selection.
    pub model_type: Str,
    /// Name for people; may be empty.
    pub name: Str,
    /// Width of the residual stream.
    pub hidden_size: u64,
    /// Decoder layers.
    pub layers: u64,
    /// Query heads.
    pub heads: u64,
    /// Key and value heads.
    pub kv_heads: u64,
    /// Elements of a head.
    pub head_dim: u64,
    /// Width of the feed-forward block.
    pub intermediate_size: u64,
    /// Rows of the embedding; token ids are below it.
    pub vocab_size: u64,
    /// Positions the model was trained for.
    pub context_length: u64,
    /// Rotated elements of a head.
    pub rope_dims: u64,
    /// Epsilon of every RMSNorm.
    pub rms_norm_eps: f32,
    /// Base of the RoPE frequencies.
    pub rope_theta: f32,
    /// 1 where query, key and value projections have biases.
    pub qkv_bias: u32,
    /// 1 where query and key heads have an RMSNorm.
    pub qk_norm: u32,
    /// 1 where the head is the embedding.
    pub tied_head: u32,
    /// Beginning-of-sequence id; `u32::MAX` where there is none.
    pub bos: u32,
    /// Ids that end a generation.
    pub eos: *const u32,
    /// How many.
    pub eos_len: usize,
    /// The host's own, for [`HostTable::tensor`].
    pub handle: *const c_void,
}

/// A device that has passed its check.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Device {
    /// Id, e.g. `cpu`, `npu5`.
    pub id: Str,
    /// Name for people.
    pub name: Str,
    /// Kind; see [`generation`].
    pub generation: u32,
    /// 1 for the in-process twin of the hardware.
    pub is_virtual: u32,
    /// Usable columns of the array, or worker threads of a CPU.
    pub columns: u32,
    /// Core rows of the array; 1 for a CPU.
    pub core_rows: u32,
    /// Memory a model may take; 0 where unknown.
    pub memory_bytes: u64,
    /// Capabilities.
    pub features: *const Str,
    /// How many.
    pub features_len: usize,
}

/// An option of the user.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct KeyValue {
    /// Key, as the route declared it.
    pub key: Str,
    /// Value; not checked by the host.
    pub value: Str,
}

/// What the user asked of the session.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// Arithmetic of CPU segments: `fast`, `exact`, …
    pub numerics: Str,
    /// Threads; 0 leaves it to the route.
    pub threads: u32,
    /// Positions of a sequence; 0 leaves it to the route.
    pub context_positions: u32,
    /// Sequences side by side; 0 leaves it to the route.
    pub sequences: u32,
    /// Not used; 0.
    pub reserved: u32,
    /// Options that the route has declared.
    pub pairs: *const KeyValue,
    /// How many.
    pub pairs_len: usize,
}

/// Arguments of [`RouteTable::fitness`]. Everything is valid for the call only.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct FitnessRequest {
    /// Bytes of this struct.
    pub size_bytes: u32,
    /// Not used; 0.
    pub reserved: u32,
    /// The model.
    pub model: *const Model,
    /// Usable devices.
    pub devices: *const Device,
    /// How many.
    pub devices_len: usize,
    /// Options.
    pub options: *const Options,
    /// Takes the reason of a decline.
    pub reason: TextSink,
    /// Takes what is worth saying beside the device's name.
    pub detail: TextSink,
}

/// Where a range of layers runs.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct Placement {
    /// First layer.
    pub start: u32,
    /// Behind the last layer.
    pub end: u32,
    /// Index of the device in the request.
    pub device: u32,
    /// What is handed on; see [`yields`].
    pub yields: u32,
}

/// Entries of [`Service::placement`].
pub const MAX_PLACEMENT: usize = 64;

/// How a route would run a model. The host passes it zeroed.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Service {
    /// Index, in the request's devices, of the one that does the main part.
    pub device: u32,
    /// Positions of a sequence: prompt and answer together; at least 1.
    pub window: u32,
    /// Expected class of speed; see [`speed`].
    pub speed: u32,
    /// How the figure is known; see [`claim`].
    pub claim: u32,
    /// Expected decode speed; 0 where not known.
    pub tokens_per_second: f64,
    /// Memory for weights and KV cache; 0 where not known.
    pub memory_bytes: u64,
    /// Used entries of `placement`; 0 means all layers on `device`.
    pub placement_len: u32,
    /// Not used; 0.
    pub reserved: u32,
    /// Where each part runs, in order, without a gap.
    pub placement: [Placement; MAX_PLACEMENT],
}

impl Default for Service {
    fn default() -> Self {
        Self {
            device: 0,
            window: 0,
            speed: 0,
            claim: 0,
            tokens_per_second: 0.0,
            memory_bytes: 0,
            placement_len: 0,
            reserved: 0,
            placement: [Placement::default(); MAX_PLACEMENT],
        }
    }
}

/// Arguments of [`RouteTable::open`]. Valid for the call only, but for tensors of the model.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct OpenRequest {
    /// Bytes of this struct.
    pub size_bytes: u32,
    /// Not used; 0.
    pub reserved: u32,
    /// The model.
    pub model: *const Model,
    /// Usable devices, those of the service first to last as in its placement.
    pub devices: *const Device,
    /// How many.
    pub devices_len: usize,
    /// What `fitness` said.
    pub service: *const Service,
    /// Options.
    pub options: *const Options,
    /// Takes the reason of a failure.
    pub error: TextSink,
    /// Takes one line about a generator, for people.
    pub describe: TextSink,
}

/// The caller's hold on a running call. Valid for the call only.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Control {
    /// Passed to `check`.
    pub state: *const c_void,
    /// [`status::OK`], [`status::CANCELLED`] or [`status::DEADLINE_PASSED`]. May be called from any thread.
    pub check: Option<unsafe extern "C" fn(state: *const c_void) -> i32>,
}

/// One position of one sequence.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Row {
    /// Sequence, from 0.
    pub sequence: u32,
    /// Token id.
    pub token: u32,
    /// Position, from 0; ascending and gapless.
    pub position: u32,
}

/// Functions of a session that yields logits. One thread at a time calls them, not always the same.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct StepperTable {
    /// Bytes of this struct.
    pub size_bytes: u32,
    /// Not used; 0.
    pub reserved: u32,
    /// Called before a generation. May be null.
    pub begin: Option<unsafe extern "C" fn(state: *mut c_void, error: TextSink) -> i32>,
    /// Called after a generation, also after a failed one. May be null.
    pub end: Option<unsafe extern "C" fn(state: *mut c_void)>,
    /// Runs rows, at most `rows_per_call`, and writes one row of `vocab_size` logits for each row whose flag is 1, in order.
    /// All are finite: a token that must not be chosen has a very low one, as -1e30.
    pub step: Option<
        unsafe extern "C" fn(
            state: *mut c_void,
            rows: *const Row,
            wanted: *const u8,
            rows_len: usize,
            logits: *mut f32,
            logits_len: usize,
            control: *const Control,
            error: TextSink,
        ) -> i32,
    >,
    /// Forgets positions from `len` on; returns how many remain, at most `len`.
    pub truncate: Option<unsafe extern "C" fn(state: *mut c_void, sequence: u32, len: u64) -> u64>,
}

/// Arguments of [`GeneratorTable::generate`].
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct GenerateRequest {
    /// Bytes of this struct.
    pub size_bytes: u32,
    /// Tokens to generate at most.
    pub max_tokens: u32,
    /// Prompt ids.
    pub prompt: *const u32,
    /// How many.
    pub prompt_len: usize,
    /// 1.0 is off.
    pub repetition_penalty: f32,
    /// Tokens the penalty looks back over.
    pub penalty_window: u32,
    /// Passed to `on_token`.
    pub on_token_state: *mut c_void,
    /// Takes a token as soon as it is known; 0 means: stop now. Called on the thread of the call.
    pub on_token: Option<unsafe extern "C" fn(state: *mut c_void, token: u32) -> i32>,
    /// Cancellation and deadline.
    pub control: *const Control,
    /// Takes the reason of a failure.
    pub error: TextSink,
}

/// What a generator reports at the end.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct GenerateOutcome {
    /// Time spent on the prompt.
    pub prefill_ms: f64,
    /// Time spent on the rest.
    pub decode_ms: f64,
    /// 1 where an end-of-generation id ended it.
    pub stopped_at_eos: u32,
    /// Prompt positions taken from the route's own cache.
    pub reused: u32,
}

/// Functions of a session that yields tokens.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct GeneratorTable {
    /// Bytes of this struct.
    pub size_bytes: u32,
    /// Not used; 0.
    pub reserved: u32,
    /// Generates.
    pub generate: Option<
        unsafe extern "C" fn(state: *mut c_void, request: *const GenerateRequest, outcome: *mut GenerateOutcome) -> i32,
    >,
}

/// An open session. The host passes it zeroed.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Session {
    /// See [`session_kind`].
    pub kind: u32,
    /// Entries of a logits row (stepper).
    pub vocab_size: u32,
    /// Positions of a sequence.
    pub positions: u32,
    /// Rows of one call at most (stepper).
    pub rows_per_call: u32,
    /// Sequences held side by side (stepper).
    pub sequences: u32,
    /// The route's own repetition penalty (generator); 0 is 1.0, off.
    pub default_repetition_penalty: f32,
    /// 1 where the template leaves the model inside a thought (generator).
    pub opens_think: u32,
    /// Not used; 0.
    pub reserved: u32,
    /// Passed to every function. One thread at a time uses it, not always the same.
    pub state: *mut c_void,
    /// Functions of a stepper; lives as long as the session.
    pub stepper: *const StepperTable,
    /// Functions of a generator; lives as long as the session.
    pub generator: *const GeneratorTable,
    /// Called once, last, also where the session broke: what cannot be freed then has to be left. May be null.
    pub close: Option<unsafe extern "C" fn(state: *mut c_void)>,
}

impl Default for Session {
    fn default() -> Self {
        Self {
            kind: 0,
            vocab_size: 0,
            positions: 0,
            rows_per_call: 0,
            sequences: 0,
            default_repetition_penalty: 0.0,
            opens_think: 0,
            reserved: 0,
            state: std::ptr::null_mut(),
            stepper: std::ptr::null(),
            generator: std::ptr::null(),
            close: None,
        }
    }
}

/// An option that a route takes.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct OptionSpec {
    /// Key.
    pub key: Str,
    /// One line for people; may be empty.
    pub help: Str,
}

/// A route. Its functions may be called from any thread, also at the same time.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct RouteTable {
    /// Bytes of this struct.
    pub size_bytes: u32,
    /// See [`route_flags`].
    pub flags: u32,
    /// Name, unique among loaded add-ons.
    pub name: Str,
    /// Model types; `*` for all.
    pub model_types: *const Str,
    /// How many; at least 1.
    pub model_types_len: usize,
    /// Options it takes.
    pub options: *const OptionSpec,
    /// How many.
    pub options_len: usize,
    /// Passed to every function.
    pub state: *mut c_void,
    /// Whether and how it would run a model; see [`fitness`].
    pub fitness:
        Option<unsafe extern "C" fn(state: *mut c_void, request: *const FitnessRequest, service: *mut Service) -> i32>,
    /// Opens a session.
    pub open:
        Option<unsafe extern "C" fn(state: *mut c_void, request: *const OpenRequest, session: *mut Session) -> i32>,
}

/// A subcommand of the program.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct CommandTable {
    /// Bytes of this struct.
    pub size_bytes: u32,
    /// Not used; 0.
    pub reserved: u32,
    /// Name: lower-case letters, digits and `-`.
    pub name: Str,
    /// One line for people.
    pub help: Str,
    /// Passed to `run`.
    pub state: *mut c_void,
    /// Runs with the arguments behind the name. `code` becomes the program's exit code, 0 to 255.
    pub run: Option<
        unsafe extern "C" fn(
            state: *mut c_void,
            arguments: *const Str,
            arguments_len: usize,
            output: TextSink,
            error: TextSink,
            code: *mut i32,
        ) -> i32,
    >,
}

/// Turns text into a vector.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct EncoderTable {
    /// Bytes of this struct.
    pub size_bytes: u32,
    /// Elements of a vector; at least 1.
    pub dims: u32,
    /// Name, unique among loaded add-ons.
    pub name: Str,
    /// Passed to `encode`.
    pub state: *mut c_void,
    /// Writes `dims` finite numbers.
    pub encode: Option<
        unsafe extern "C" fn(state: *mut c_void, text: Str, vector: *mut f32, dims: usize, error: TextSink) -> i32,
    >,
}

/// What the host offers. Lives as long as the process.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct HostTable {
    /// [`ABI_VERSION`] of the host. First in every version.
    pub abi_version: u32,
    /// Bytes of this struct. Second in every version.
    pub size_bytes: u32,
    /// Version of npuhal, for messages.
    pub version: Str,
    /// The tensor of a [`role`] and, from 16 on, a layer. [`status::OK`], or [`status::FAILED`] where the model has none.
    pub tensor: Option<unsafe extern "C" fn(handle: *const c_void, role: u32, layer: u32, tensor: *mut Tensor) -> i32>,
}

/// What an add-on offers.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct AddonTable {
    /// [`ABI_VERSION`] it was built for. First in every version.
    pub abi_version: u32,
    /// Bytes of this struct. Second in every version.
    pub size_bytes: u32,
    /// Name, for messages.
    pub name: Str,
    /// Version, for messages.
    pub version: Str,
    /// Routes.
    pub routes: *const RouteTable,
    /// How many.
    pub routes_len: usize,
    /// Subcommands.
    pub commands: *const CommandTable,
    /// How many.
    pub commands_len: usize,
    /// Encoders.
    pub encoders: *const EncoderTable,
    /// How many.
    pub encoders_len: usize,
}

// SAFETY: tables are constants of their library: nothing writes to them, and what they point at lives as long as the process.
#[expect(unsafe_code, reason = "a static table holds pointers to other statics")]
unsafe impl Sync for AddonTable {}
// SAFETY: as for AddonTable.
#[expect(unsafe_code, reason = "a static table holds pointers to other statics")]
unsafe impl Sync for HostTable {}

//! The command line.

use crate::command::eval::EvalArgs;
use crate::graph::Design;
use clap::builder::TypedValueParser as _;
use clap::{Args, Parser, Subcommand, ValueHint};
use clap_complete::Shell;
use npuhal_models::Catalogue;
use npuhal_models::speculate::Speculation;
use npuhal_models::window::Overflow;
use serde::{Deserialize, Serialize};
use std::ffi::{OsStr, OsString};
use std::net::IpAddr;
use std::path::PathBuf;

/// Small language models on AMD Ryzen AI NPUs, and on the CPU where there is none.
#[derive(Debug, Parser)]
#[command(name = "npuhal", version, propagate_version = true, arg_required_else_help = true, max_term_width = 100)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,

    #[command(flatten)]
    pub(crate) global: GlobalArgs,
}

/// Flags of every command.
#[derive(Debug, Clone, Args)]
pub(crate) struct GlobalArgs {
    /// Folder that holds the models [default: NPUHAL_MODELS, or else the user's data folder]
    #[arg(long, global = true, value_name = "DIR", value_hint = ValueHint::DirPath, help_heading = "Global options")]
    pub(crate) models_dir: Option<PathBuf>,

    /// Load an add-on: a library with routes, subcommands or encoders (may be given several times)
    #[arg(long, global = true, value_name = "FILE", value_hint = ValueHint::FilePath, help_heading = "Global options")]
    pub(crate) addon: Vec<PathBuf>,

    /// Use no network: a model that is not here is an error
    #[arg(long, global = true, help_heading = "Global options")]
    pub(crate) offline: bool,

    /// Accept the terms of a model that has some, by the word its notice names (may be given several times)
    #[arg(long, global = true, value_name = "WORD", help_heading = "Global options")]
    pub(crate) accept_licence: Vec<String>,

    /// Say more on stderr (-vv: everything)
    #[arg(short, long, global = true, action = clap::ArgAction::Count, help_heading = "Global options")]
    pub(crate) verbose: u8,

    /// Say nothing on stderr but errors
    #[arg(short, long, global = true, conflicts_with = "verbose", help_heading = "Global options")]
    pub(crate) quiet: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Answer a prompt; without one, chat
    Run(RunArgs),
    /// Chat in the terminal
    Chat(ChatArgs),
    /// Download a model of the catalogue and verify it
    Pull(PullArgs),
    /// List the models that are here and those that can be pulled
    List(ListArgs),
    /// Remove a model from the models folder
    Rm(RmArgs),
    /// Make an xdna1 package of a Hugging Face directory or a GGUF file
    Convert(ConvertArgs),
    /// Show what a model file or a packed directory holds
    Inspect(InspectArgs),
    /// Pack a GGUF file into a Q4NX directory for an NPU
    Pack(PackArgs),
    /// Write or import the NPU's kernels for a model
    Kit(crate::command::kit::KitArgs),
    /// Hold a Q4NX directory against the GGUF file it was made from
    Verify(VerifyArgs),
    /// Serve models over an OpenAI-compatible HTTP interface
    Serve(Box<ServeArgs>),
    /// The process that owns a model's device, started by `serve`
    #[command(hide = true)]
    Worker {
        /// What it needs to know, as JSON
        #[arg(long, value_name = "JSON")]
        settings: String,
        /// Only find out whether the session could be, and whether these folders are models of an add-on
        #[arg(long, value_name = "FOLDER", num_args = 0..)]
        check: Option<Vec<PathBuf>>,
    },
    /// Show the devices and whether each can be used
    Devices(DevicesArgs),
    /// Find out why the NPU cannot be used, and what to do about it
    Doctor(DoctorArgs),
    /// Show which route runs a model where, and why; without a model, what there is
    Routes(RoutesArgs),
    /// Measure prefill and decode speed
    Bench(BenchArgs),
    /// Measure how well a model answers, or foretells a text
    Eval(EvalArgs),
    /// Hold what one device computes against another, layer by layer
    Parity(ParityArgs),
    /// Find out whether devices choose the same tokens; without a model, try the gate itself
    Agree(AgreeArgs),
    /// Draw the array and the dataflow of a design
    Graph(GraphArgs),
    /// Print a completion script for a shell
    Completions {
        /// The shell
        shell: Shell,
    },
    /// A subcommand of an add-on
    #[command(external_subcommand)]
    OfAddon(Vec<OsString>),
}

/// Which model, and where it runs.
#[derive(Debug, Clone, Args)]
pub(crate) struct ModelArgs {
    #[arg(short, long, value_name = "MODEL", value_hint = ValueHint::AnyPath, help = format!(
        "Model: a name of the catalogue, the id of a package in the models folder, or the path of a GGUF file, a Hugging Face \
         directory, a Q4NX directory or an xdna1 package; on a server, its id [default: {}, or the server's first]",
        default_model()
    ))]
    pub(crate) model: Option<OsString>,

    /// Hash the files of an xdna1 package again even if they were verified before
    #[arg(long)]
    pub(crate) verify: bool,

    #[command(flatten)]
    pub(crate) session: SessionArgs,
}

/// Where a model runs, and how. Handed on to workers.
#[derive(Debug, Clone, PartialEq, Args, Serialize, Deserialize)]
pub(crate) struct SessionArgs {
    /// Device: auto, cpu, npu1, npu5, virtual:npu1, … A device named here is used or it is an error. Layers may be spread over
    /// devices: 0..16@virtual:npu1,16..@cpu
    #[arg(long, value_name = "DEVICE", default_value = "auto")]
    pub(crate) device: String,

    /// Arithmetic of the CPU: fast, int8 (faster and coarser), exact (the slow reference), or that of an NPU lane: xdna1-smollm,
    /// xdna1-smollm-chunk, xdna1-qwen, xdna1-cpu, xdna2
    #[arg(long, value_name = "NAME", default_value = "fast")]
    pub(crate) numerics: String,

    /// Threads [default: the number of cores]
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(crate) threads: Option<u32>,

    /// Instruction set of the CPU: portable, avx2, avx-vnni or avx512-vnni [default: NPUHAL_CPU_FEATURES, or the best there is]
    #[arg(long, value_name = "NAME")]
    pub(crate) cpu_features: Option<String>,

    /// Positions of the context [default: the model's own]
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u32).range(2..))]
    pub(crate) context: Option<u32>,

    /// What matters most where several routes serve: npu, speed or context [default: the order of precedence]
    #[arg(long, value_name = "WHAT")]
    pub(crate) prefer: Option<String>,

    /// Leading layers on the NPU; the rest runs on the CPU; auto takes what is the fastest by what is known of the devices
    /// [default: all, where the NPU serves]
    #[arg(long, value_name = "N", conflicts_with = "npu_percent")]
    pub(crate) npu_layers: Option<String>,

    /// The same as a share of all layers, 0 to 100
    #[arg(long, value_name = "P", value_parser = percent, allow_negative_numbers = true)]
    pub(crate) npu_percent: Option<f64>,

    /// Folder of the NPU's compiled kernels [default: npu/ in the model's directory]
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub(crate) kernels: Option<PathBuf>,

    /// Option of a route; `npuhal routes` lists them (may be given several times)
    #[arg(long, value_name = "KEY=VALUE")]
    pub(crate) npu_opt: Vec<String>,

    /// Sequences held side by side; commands that need several set it.
    #[arg(skip)]
    pub(crate) sequences: Option<u32>,
}

impl ModelArgs {
    /// What the model is called.
    pub(crate) fn name(&self) -> &OsStr {
        self.model.as_deref().unwrap_or(OsStr::new(default_model()))
    }
}

/// The model that is taken where none is named.
pub(crate) fn default_model() -> &'static str {
    &Catalogue::builtin().default_entry().name
}

impl SessionArgs {
    /// Whether nothing was said of where a model runs, and how.
    pub(crate) fn is_unset(&self) -> bool {
        let unset = Self {
            device: "auto".to_owned(),
            numerics: "fast".to_owned(),
            threads: None,
            cpu_features: None,
            context: None,
            prefer: None,
            npu_layers: None,
            npu_percent: None,
            kernels: None,
            npu_opt: Vec::new(),
            sequences: None,
        };
        *self == unset
    }
}

/// How an answer is made.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Generation")]
pub(crate) struct GenerationArgs {
    /// System message [default: the one of the model's template]
    #[arg(short, long, value_name = "TEXT")]
    pub(crate) system: Option<String>,

    /// Tokens to generate at most [default: until the model ends or the context is full]
    #[arg(short = 'n', long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) max_tokens: Option<u32>,

    /// Randomness, 0 to 2; 0 is greedy [default: what the model's authors suggest, or else 0; also of the next four]
    #[arg(long, value_name = "T")]
    pub(crate) temperature: Option<f64>,

    /// Keep the most probable tokens that reach this probability together; 1 keeps all
    #[arg(long, value_name = "P")]
    pub(crate) top_p: Option<f64>,

    /// Keep the K most probable tokens; 0 keeps all
    #[arg(long, value_name = "K")]
    pub(crate) top_k: Option<u32>,

    /// Drop tokens less probable than this share of the best one; 0 keeps all
    #[arg(long, value_name = "P")]
    pub(crate) min_p: Option<f64>,

    /// Divide the logits of tokens seen before; 1 is off
    #[arg(long, value_name = "R")]
    pub(crate) repetition_penalty: Option<f64>,

    /// Lower the logits of tokens seen before, once
    #[arg(long, value_name = "P", default_value_t = 0.0, allow_negative_numbers = true)]
    pub(crate) presence_penalty: f64,

    /// Lower the logits of tokens seen before, each time
    #[arg(long, value_name = "P", default_value_t = 0.0, allow_negative_numbers = true)]
    pub(crate) frequency_penalty: f64,

    /// Add BIAS (-100 to 100) to the logit of the token ID (may be given several times)
    #[arg(long, value_name = "ID=BIAS", value_parser = bias)]
    pub(crate) logit_bias: Vec<(u32, f64)>,

    /// Seed of the draws; the same seed gives the same answer
    #[arg(long, value_name = "N")]
    pub(crate) seed: Option<u64>,

    /// End the answer before this text (may be given up to 4 times)
    #[arg(long, value_name = "TEXT")]
    pub(crate) stop: Vec<String>,

    /// Thoughts of models that think first: shown (dim, at a terminal only), hidden, or asked not to be
    /// [default: shown, and the model's template decides whether it thinks]
    #[arg(long, value_name = "MODE")]
    pub(crate) think: Option<ThinkMode>,

    /// Tokens of thoughts at most; then the model is made to answer
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) think_budget: Option<u32>,

    /// What becomes of a prompt that the context cannot hold: truncate (old turns go first) or error
    #[arg(long, value_name = "WHAT", default_value = "truncate")]
    pub(crate) context_overflow: Overflow,

    /// Guess tokens ahead where that is faster: prompt-lookup, or prompt-lookup:N for at most N a step. The answer is the same
    #[arg(long, value_name = "KIND")]
    pub(crate) speculate: Option<Speculation>,

    /// Print the figures of each answer on stderr
    #[arg(long)]
    pub(crate) stats: bool,
}

/// What becomes of a model's thoughts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum ThinkMode {
    /// Think, and show it
    On,
    /// Do not think
    Off,
    /// Think, and hide it
    Hide,
}

#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    /// The prompt; several words are joined by spaces. Piped input is put behind it
    #[arg(value_name = "PROMPT")]
    pub(crate) prompt: Vec<String>,

    #[command(flatten)]
    pub(crate) model: ModelArgs,

    #[command(flatten)]
    pub(crate) generation: GenerationArgs,

    /// Continue the prompt as plain text, without a chat template
    #[arg(long, help_heading = "Generation")]
    pub(crate) raw: bool,

    /// Answers to the prompt, one after the other; of each the seed is told with --stats
    #[arg(long = "n", value_name = "N", default_value_t = 1, help_heading = "Generation")]
    pub(crate) choices: usize,

    /// Print the log probability of each token, with this many alternatives (0 to 20)
    #[arg(long, value_name = "N", help_heading = "Generation")]
    pub(crate) logprobs: Option<usize>,

    /// Print the prompt in front of its continuation; with --logprobs its tokens are listed as well
    #[arg(long, requires = "raw", help_heading = "Generation")]
    pub(crate) echo: bool,
}

fn percent(text: &str) -> Result<f64, String> {
    let percent = text.parse::<f64>().ok().filter(|percent| (0.0..=100.0).contains(percent));
    percent.ok_or_else(|| "wanted a number from 0 to 100".to_owned())
}

/// A token's id and what is added to its logit.
fn bias(text: &str) -> Result<(u32, f64), String> {
    let parse = |(id, bias): (&str, &str)| Some((id.trim().parse().ok()?, bias.trim().parse().ok()?));
    let pair = text.split_once('=').and_then(parse);
    pair.ok_or_else(|| "wanted a token's id and a number, such as 198=-100".to_owned())
}

#[derive(Debug, Args)]
pub(crate) struct ChatArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,

    /// Ask a server with the OpenAI interface instead, e.g. http://127.0.0.1:8000 [default: NPUHAL_API_URL]
    #[arg(long, value_name = "URL", help_heading = "Server")]
    pub(crate) api_url: Option<String>,

    /// Key of the server; sent encrypted, or to this machine [default: NPUHAL_API_KEY]
    #[arg(long, value_name = "KEY", help_heading = "Server")]
    pub(crate) api_key: Option<String>,

    /// Answer this, print the figures of the answer and end
    #[arg(long, value_name = "TEXT")]
    pub(crate) prompt: Option<String>,

    #[command(flatten)]
    pub(crate) generation: GenerationArgs,
}

#[derive(Debug, Args)]
pub(crate) struct ServeArgs {
    /// Model: a name of the catalogue, or a path (may be given several times; the first is the default)
    /// [default: all in the models folder]
    #[arg(short, long, value_name = "MODEL", value_hint = ValueHint::AnyPath)]
    pub(crate) model: Vec<OsString>,

    #[command(flatten)]
    pub(crate) session: SessionArgs,

    /// Address to listen on
    #[arg(long, value_name = "ADDRESS", default_value_t = crate::command::serve::DEFAULT_HOST, help_heading = "Server")]
    pub(crate) host: IpAddr,

    /// Port; 0 takes any that is free
    #[arg(long, value_name = "PORT", default_value_t = 8000, help_heading = "Server")]
    pub(crate) port: u16,

    /// Key that clients must send [default: NPUHAL_API_KEY; without, none on this machine alone, else a random one]
    #[arg(long, value_name = "KEY", help_heading = "Server")]
    pub(crate) api_key: Option<String>,

    /// Origin of a web page that may ask (may be given several times)
    /// [default: http://127.0.0.1:3000 and http://localhost:3000]
    #[arg(long, value_name = "ORIGIN", help_heading = "Server")]
    pub(crate) cors_origin: Vec<String>,

    /// Certificates in PEM form, for TLS
    #[arg(long, value_name = "FILE", requires = "tls_key", value_hint = ValueHint::FilePath, help_heading = "Server")]
    pub(crate) tls_cert: Option<PathBuf>,

    /// Key of the certificate in PEM form
    #[arg(long, value_name = "FILE", requires = "tls_cert", value_hint = ValueHint::FilePath, help_heading = "Server")]
    pub(crate) tls_key: Option<PathBuf>,

    /// Requests that run side by side as rows of one forward pass, where the device can
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=64), help_heading = "Server")]
    pub(crate) parallel: u32,

    /// Models that are resident at a time; the least recently used one makes place
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64), help_heading = "Server")]
    pub(crate) max_resident: u32,

    /// Requests that may wait beside those that run
    #[arg(long, value_name = "N", default_value_t = 16, help_heading = "Server")]
    pub(crate) queue_capacity: u32,

    /// Requests a minute of a client on another machine; 0 for any number
    #[arg(long, value_name = "N", default_value_t = 0, help_heading = "Server")]
    pub(crate) rate_limit_per_minute: u32,

    /// Limit clients on this machine, too
    #[arg(long, requires = "rate_limit_per_minute", help_heading = "Server")]
    pub(crate) rate_limit_local: bool,

    /// Bytes of a request's body at most
    #[arg(long, value_name = "N", default_value_t = 1 << 20, value_parser = clap::value_parser!(u32).range(1024..=(64 << 20)), help_heading = "Server")]
    pub(crate) max_body_bytes: u32,

    /// Characters of a message or a prompt at most
    #[arg(long, value_name = "N", default_value_t = npuhal_server::DEFAULT_MAX_CHARS as u32, value_parser = clap::value_parser!(u32).range(1..), help_heading = "Server")]
    pub(crate) max_chars: u32,

    /// What becomes of a prompt that the context cannot hold: truncate (old turns go first) or error
    /// [default: truncate for xdna1 packages, error for all others]
    #[arg(long, value_name = "WHAT", help_heading = "Server")]
    pub(crate) context_overflow: Option<Overflow>,

    /// Seconds from a request's arrival to the end of its answer
    #[arg(long, value_name = "SECONDS", default_value_t = 120, value_parser = clap::value_parser!(u64).range(1..=86400), help_heading = "Server")]
    pub(crate) request_timeout: u64,

    /// Milliseconds of silence in a stream after which a comment is sent
    #[arg(long, value_name = "MS", default_value_t = 10_000, value_parser = clap::value_parser!(u64).range(1..), help_heading = "Server")]
    pub(crate) heartbeat_ms: u64,
    /// Seconds a client has for the head of a request, and again for its body, and to take in something of its answer
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=86400), help_heading = "Server")]
    pub(crate) body_timeout: u64,

    /// Seconds without a sign of life after which a worker is replaced
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=86400), help_heading = "Server")]
    pub(crate) stall_timeout: u64,

    /// Seconds that admitted requests have when the server is told to end
    #[arg(long, value_name = "SECONDS", default_value_t = 130, value_parser = clap::value_parser!(u64).range(1..=86400), help_heading = "Server")]
    pub(crate) graceful_shutdown_timeout: u64,

    /// Load the model at the first request, not at the start
    #[arg(long, help_heading = "Server")]
    pub(crate) no_prewarm: bool,

    /// Call a model ready without trying it
    #[arg(long, help_heading = "Server")]
    pub(crate) no_self_test: bool,

    /// Run the worker as a thread, for debugging: what crashes there takes the server with it
    #[arg(long, help_heading = "Server")]
    pub(crate) in_process: bool,
}

#[derive(Debug, Args)]
pub(crate) struct PullArgs {
    /// Names of the catalogue
    #[arg(value_name = "MODEL", default_value = default_model())]
    pub(crate) models: Vec<String>,

    /// Hash the file again even if it was verified before
    #[arg(long)]
    pub(crate) verify: bool,
}

#[derive(Debug, Args)]
pub(crate) struct ListArgs {
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct RmArgs {
    /// Names of the catalogue, or file names in the models folder
    #[arg(value_name = "MODEL", required = true)]
    pub(crate) models: Vec<String>,
}

#[derive(Debug, Args)]
pub(crate) struct ConvertArgs {
    /// A directory with config.json and safetensors, a GGUF file, or a name of the catalogue
    #[arg(value_name = "SRC", value_hint = ValueHint::AnyPath)]
    pub(crate) source: PathBuf,

    /// Directory of the package; a package that is there is replaced
    #[arg(value_name = "OUT", value_hint = ValueHint::DirPath)]
    pub(crate) target: PathBuf,

    /// Id under which the model is served [default: none; of a GGUF file, made from its name]
    #[arg(long, value_name = "ID")]
    pub(crate) model_id: Option<String>,

    /// Repository the checkpoint comes from, to be recorded
    #[arg(long, value_name = "OWNER/NAME")]
    pub(crate) source_model: Option<String>,

    /// Commit of the repository, to be recorded
    #[arg(long, value_name = "COMMIT")]
    pub(crate) source_revision: Option<String>,

    /// Name for people, to be recorded
    #[arg(long, value_name = "NAME")]
    pub(crate) display_name: Option<String>,

    /// Threads [default: the number of cores]
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(crate) threads: Option<u32>,
}

#[derive(Debug, Args)]
#[command(after_help = "Exit code: 0, 1 where it cannot be read or run as a model, 2 where it is damaged.")]
pub(crate) struct InspectArgs {
    /// A GGUF file, a Q4NX directory, an xdna1 package, or a name of the catalogue
    #[arg(value_name = "PATH", value_hint = ValueHint::AnyPath)]
    pub(crate) model: OsString,

    /// Also list every tensor and every metadata key
    #[arg(long)]
    pub(crate) all: bool,

    /// Hash every file of an xdna1 package, or a file of the catalogue and compare
    #[arg(long)]
    pub(crate) verify_checksums: bool,

    /// Print JSON; short for --format json
    #[arg(long, conflicts_with = "format")]
    pub(crate) json: bool,

    /// Form of the report
    #[arg(long, value_name = "FORM", default_value = "text")]
    pub(crate) format: ReportFormat,

    /// Write the report to a file
    #[arg(short, long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) output: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct PackArgs {
    /// A GGUF file of architecture qwen3 or qwen2, or a name of the catalogue
    #[arg(value_name = "GGUF", value_hint = ValueHint::AnyPath)]
    pub(crate) model: OsString,

    /// The directory to make
    #[arg(value_name = "OUT", value_hint = ValueHint::DirPath)]
    pub(crate) out: PathBuf,

    /// Copy tokenizer.json and tokenizer_config.json from here [default: made from the GGUF file]
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub(crate) tokenizer: Option<PathBuf>,

    /// Replace a directory that was packed before; its kernels (npu/) stay
    #[arg(long)]
    pub(crate) force: bool,

    /// Threads [default: the number of cores]
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(crate) threads: Option<u32>,
}

#[derive(Debug, Args)]
#[command(after_help = "Exit code: 0 where the directory is what its file says, else 1.")]
pub(crate) struct VerifyArgs {
    /// The GGUF file, or a name of the catalogue
    #[arg(value_name = "GGUF", value_hint = ValueHint::AnyPath)]
    pub(crate) model: OsString,

    /// The Q4NX directory
    #[arg(value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub(crate) directory: PathBuf,

    /// Print every tensor, not only layer 0 and what is in no layer
    #[arg(long)]
    pub(crate) all: bool,

    /// Threads [default: the number of cores]
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(crate) threads: Option<u32>,
}

#[derive(Debug, Args)]
pub(crate) struct DevicesArgs {
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "Exit code: 0 all well, 1 with warnings, 2 where something that is here cannot be used.")]
pub(crate) struct DoctorArgs {
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,

    /// Examine the tree of another machine (sys, dev, proc, etc, var/log) instead of this one
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub(crate) root: Option<PathBuf>,

    /// NPU to try: npu1, npu5, virtual:npu1, … [default: those that are found]
    #[arg(long, value_name = "DEVICE", conflicts_with = "root")]
    pub(crate) device: Option<String>,

    /// Read the kernel log from a file, e.g. one made with `sudo dmesg > FILE`
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) kernel_log: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct RoutesArgs {
    /// Model: a name of the catalogue, or the path of a model [default: none, list what there is]
    #[arg(short, long, value_name = "MODEL", value_hint = ValueHint::AnyPath)]
    pub(crate) model: Option<OsString>,

    #[command(flatten)]
    pub(crate) session: SessionArgs,

    /// Positions that prompt and answer need together; 0 is not known yet
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) needs: u32,

    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// Form of a report.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum ReportFormat {
    /// Lines for a terminal
    Text,
    /// JSON
    Json,
    /// Markdown
    Markdown,
}

#[derive(Debug, Args)]
#[command(
    after_help = "DEVICE is also written with an arithmetic (cpu:exact), with options (cpu?numerics=exact&threads=1), or as \
                        layers on devices (0..16@cpu:exact,16..@cpu).\n\
                        Exit code: 0 within the tolerances of the routes, 1 beyond them."
)]
pub(crate) struct ParityArgs {
    /// Model: a name of the catalogue, or the path of a model
    #[arg(short, long, value_name = "MODEL", default_value = default_model(), value_hint = ValueHint::AnyPath)]
    pub(crate) model: OsString,

    #[command(flatten)]
    pub(crate) session: SessionArgs,

    /// The reference
    #[arg(long, value_name = "DEVICE", default_value = "cpu:exact")]
    pub(crate) against: String,

    /// Model of the reference, where it is another file of the same model, e.g. the one a directory was packed from
    /// [default: the same]
    #[arg(long, value_name = "MODEL", value_hint = ValueHint::AnyPath)]
    pub(crate) against_model: Option<OsString>,

    /// Feed this text, in the model's template [default: drawn ids]
    #[arg(long, value_name = "TEXT")]
    pub(crate) prompt: Option<String>,

    /// Positions to compare [default: 16 drawn ids, or the whole prompt]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65536).map(|count| count as usize))]
    pub(crate) tokens: Option<usize>,

    /// Seed of the drawn ids
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) seed: u64,

    /// Likeliest tokens whose overlap is counted
    #[arg(long, value_name = "K", default_value_t = 5)]
    pub(crate) top_k: usize,

    /// Smallest cosine of a row with its counterpart [default: the routes' own]
    #[arg(long, value_name = "C")]
    pub(crate) min_cosine: Option<f64>,

    /// Largest error, as a share of the root mean square of the row [default: the routes' own]
    #[arg(long, value_name = "E")]
    pub(crate) max_error: Option<f64>,

    /// Accept another likeliest token where the two highest logits are closer than this [default: the routes' own]
    #[arg(long, value_name = "LOGITS")]
    pub(crate) near_tie: Option<f64>,

    /// Form of the report
    #[arg(long, value_enum, default_value_t = ReportFormat::Text)]
    pub(crate) format: ReportFormat,

    /// Write the report here
    #[arg(short, long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) output: Option<PathBuf>,
}

#[derive(Debug, Args)]
#[command(
    after_help = "Exit code: 0 where everything agrees (or the gate does with each scenario what it is there for), else 1."
)]
pub(crate) struct AgreeArgs {
    /// Model whose placements are asked [default: none, synthetic placements]
    #[arg(short, long, value_name = "MODEL", value_hint = ValueHint::AnyPath)]
    pub(crate) model: Option<OsString>,

    /// Synthetic placements: pass, fail_confident, exact or all
    #[arg(long, value_name = "NAME", default_value = "all", conflicts_with = "model")]
    pub(crate) scenario: String,

    /// A device to compare with the reference, as for parity (may be given several times)
    /// [default: cpu:exact, and every NPU that runs the model]
    #[arg(long, value_name = "DEVICE", requires = "model")]
    pub(crate) placement: Vec<String>,

    /// The reference, whose likeliest tokens all are fed
    #[arg(long, value_name = "DEVICE", default_value = "cpu", requires = "model")]
    pub(crate) reference: String,

    /// Start from this text, in the model's template [default: drawn ids]
    #[arg(long, value_name = "TEXT", requires = "model")]
    pub(crate) prompt: Option<String>,

    /// Positions [default: 16; with --prompt, 16 behind those of the prompt]
    #[arg(long, value_name = "N")]
    pub(crate) positions: Option<usize>,

    /// Candidates at each position
    #[arg(long, value_name = "K", default_value_t = 5)]
    pub(crate) top_k: usize,

    /// A difference fails where the reference prefers its token by this much, in natural logarithms
    #[arg(long, value_name = "M", default_value_t = 1.0, allow_negative_numbers = true)]
    pub(crate) margin_threshold: f64,

    /// Seed of the draws
    #[arg(long, value_name = "N", default_value_t = 42)]
    pub(crate) seed: u64,

    #[command(flatten)]
    pub(crate) session: SessionArgs,

    /// Form of the report
    #[arg(long, value_enum, default_value_t = ReportFormat::Text)]
    pub(crate) format: ReportFormat,

    /// Write the report here
    #[arg(short, long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) output: Option<PathBuf>,
}

/// Form of a drawing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum GraphFormat {
    /// A picture
    Svg,
    /// For Graphviz
    Dot,
    /// Tiles and channels as data
    Json,
    /// A grid and a table
    Text,
    /// All of them
    All,
}

#[derive(Debug, Args)]
pub(crate) struct GraphArgs {
    /// What to draw
    #[arg(long, value_enum, default_value_t = Design::Smollm)]
    pub(crate) design: Design,

    /// Form
    #[arg(long, value_enum, default_value_t = GraphFormat::Svg)]
    pub(crate) format: GraphFormat,

    /// Model whose shape the lane is drawn for [default: that of Qwen3-0.6B]
    #[arg(short, long, value_name = "MODEL", value_hint = ValueHint::AnyPath)]
    pub(crate) model: Option<OsString>,

    /// Write here; with the format all, beside this name [default: print]
    #[arg(short, long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) output: Option<PathBuf>,
}

#[derive(Debug, Clone, Args)]
#[command(after_help = "Exit code of --url: 0, 1 where a request failed, 2 where --min-tps is not reached.")]
pub(crate) struct BenchArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,

    #[command(flatten)]
    pub(crate) http: crate::command::bench_http::HttpBenchArgs,

    /// Measure what a layer, a dispatch and the head cost on the device, and keep it for `--npu-layers auto`
    #[arg(long, conflicts_with_all = ["ttft", "ttft_text", "jsonl"])]
    pub(crate) calibrate: bool,

    /// Prefill sizes
    #[arg(long, value_name = "N,…", value_delimiter = ',', default_value = "32,128,512", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) pp: Vec<u32>,

    /// Decode steps
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) tg: u32,

    /// Context lengths at which decoding starts
    #[arg(long, value_name = "N,…", value_delimiter = ',', default_value = "0,512")]
    pub(crate) depths: Vec<u32>,

    /// Decode so many sequences as rows of one forward pass instead, and print the ratio to one
    #[arg(long, value_name = "N,…", value_delimiter = ',', conflicts_with_all = ["ttft", "ttft_text", "pp"], value_parser = clap::value_parser!(u32).range(1..=256))]
    pub(crate) parallel: Vec<u32>,

    /// Repeat every test this often and report medians
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(crate) rounds: u32,

    /// One JSON object a line
    #[arg(long)]
    pub(crate) jsonl: bool,

    /// Only load, prefill N ids, print one line and exit: time to first token
    #[arg(long, value_name = "N", conflicts_with_all = ["ttft_text"], value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) ttft: Option<u32>,

    /// The same from a text: tokenizer and template included
    #[arg(long, value_name = "TEXT")]
    pub(crate) ttft_text: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_said_of_a_session_is_known() {
        let session =
            |flags: &[&str]| match Cli::try_parse_from(["npuhal", "chat"].iter().chain(flags)).unwrap().command {
                Command::Chat(args) => args.model.session,
                other => panic!("{other:?}"),
            };
        assert!(session(&[]).is_unset());
        for flags in [["--device", "cpu"], ["--threads", "1"], ["--npu-opt", "a=b"], ["--npu-percent", "5"]] {
            assert!(!session(&flags).is_unset(), "{flags:?}");
        }
    }
}

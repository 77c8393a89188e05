//! The command line.

use clap::{Args, Parser, Subcommand, ValueHint};
use clap_complete::Shell;
use std::ffi::OsString;
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
    /// Hold a Q4NX directory against the GGUF file it was made from
    Verify(VerifyArgs),
    /// Show the devices and whether each can be used
    Devices(DevicesArgs),
    /// Find out why the NPU cannot be used, and what to do about it
    Doctor(DoctorArgs),
    /// Show which route runs a model where, and why; without a model, what there is
    Routes(RoutesArgs),
    /// Measure prefill and decode speed
    Bench(BenchArgs),
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
    /// Model: a name of the catalogue, or the path of a GGUF file or a Q4NX directory
    #[arg(short, long, value_name = "MODEL", default_value = "smollm2-135m", value_hint = ValueHint::AnyPath)]
    pub(crate) model: OsString,

    #[command(flatten)]
    pub(crate) session: SessionArgs,
}

/// Where a model runs, and how.
#[derive(Debug, Clone, Args)]
pub(crate) struct SessionArgs {
    /// Device: auto, cpu, npu1, npu5, virtual:npu1, … A device named here is used or it is an error
    #[arg(long, value_name = "DEVICE", default_value = "auto")]
    pub(crate) device: String,

    /// Arithmetic of the CPU: fast, exact (the slow reference), or that of an NPU lane: xdna1-smollm, xdna1-qwen, xdna1-cpu, xdna2
    #[arg(long, value_name = "NAME", default_value = "fast")]
    pub(crate) numerics: String,

    /// Threads [default: the number of cores]
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(crate) threads: Option<u32>,

    /// Positions of the context [default: the model's own]
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u32).range(2..))]
    pub(crate) context: Option<u32>,

    /// What matters most where several routes serve: npu, speed or context [default: the order of precedence]
    #[arg(long, value_name = "WHAT")]
    pub(crate) prefer: Option<String>,

    /// Option of a route; `npuhal routes` lists them (may be given several times)
    #[arg(long, value_name = "KEY=VALUE")]
    pub(crate) npu_opt: Vec<String>,
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

    /// Randomness, 0 to 2; 0 is greedy
    #[arg(long, value_name = "T", default_value_t = 0.0)]
    pub(crate) temperature: f64,

    /// Keep the most probable tokens that reach this probability together
    #[arg(long, value_name = "P", default_value_t = 1.0)]
    pub(crate) top_p: f64,

    /// Keep the K most probable tokens; 0 keeps all
    #[arg(long, value_name = "K", default_value_t = 0)]
    pub(crate) top_k: u32,

    /// Drop tokens less probable than this share of the best one
    #[arg(long, value_name = "P", default_value_t = 0.0)]
    pub(crate) min_p: f64,

    /// Divide the logits of tokens seen before; 1 is off
    #[arg(long, value_name = "R", default_value_t = 1.0)]
    pub(crate) repetition_penalty: f64,

    /// Lower the logits of tokens seen before, once
    #[arg(long, value_name = "P", default_value_t = 0.0, allow_negative_numbers = true)]
    pub(crate) presence_penalty: f64,

    /// Lower the logits of tokens seen before, each time
    #[arg(long, value_name = "P", default_value_t = 0.0, allow_negative_numbers = true)]
    pub(crate) frequency_penalty: f64,

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
}

#[derive(Debug, Args)]
pub(crate) struct ChatArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,

    #[command(flatten)]
    pub(crate) generation: GenerationArgs,
}

#[derive(Debug, Args)]
pub(crate) struct PullArgs {
    /// Names of the catalogue
    #[arg(value_name = "MODEL", default_value = "smollm2-135m")]
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
pub(crate) struct InspectArgs {
    /// A GGUF file, a Q4NX directory, or a name of the catalogue
    #[arg(value_name = "PATH", value_hint = ValueHint::AnyPath)]
    pub(crate) model: OsString,

    /// Also list every tensor and every metadata key
    #[arg(long)]
    pub(crate) all: bool,

    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
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

    /// Replace a directory that was packed before
    #[arg(long)]
    pub(crate) force: bool,

    /// Threads [default: the number of cores]
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(crate) threads: Option<u32>,
}

#[derive(Debug, Args)]
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
    /// Model: a name of the catalogue or the path of a GGUF file [default: none, list what there is]
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

#[derive(Debug, Clone, Args)]
pub(crate) struct BenchArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,

    /// Prefill sizes
    #[arg(long, value_name = "N,…", value_delimiter = ',', default_value = "32,128,512", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) pp: Vec<u32>,

    /// Decode steps
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) tg: u32,

    /// Context lengths at which decoding starts
    #[arg(long, value_name = "N,…", value_delimiter = ',', default_value = "0,512")]
    pub(crate) depths: Vec<u32>,

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

//! Flags of `npuhal eval`.

use crate::args::{ReportFormat, SessionArgs, default_model};
use clap::{Args, ValueHint};
use std::ffi::OsString;
use std::path::PathBuf;

/// Positions of a window of a text.
pub(super) const DEFAULT_WINDOW: u32 = 512;

#[derive(Debug, Args)]
#[command(after_help = "\
Without --perplexity: prompts are continued greedily as plain text; an answer matches where it contains what is expected, upper
or lower case. Loss and perplexity are those of the answer's own tokens. Six items are built in.
With --perplexity: every token of a text is scored, teacher-forced; --numerics and -m take several values, and with --reference
each is held against one of them.
Exit code: 0, or 1 where a limit is broken or a server cannot be asked.")]
pub(crate) struct EvalArgs {
    #[arg(short, long = "model", value_name = "MODEL", value_delimiter = ',', value_hint = ValueHint::AnyPath, help = format!(
        "Model: a name of the catalogue, or the path of a file or directory; on a server, its id [default: {}, or the server's \
         first]",
        default_model()
    ))]
    pub(crate) models: Vec<OsString>,

    #[command(flatten)]
    pub(crate) session: SessionArgs,

    /// Ask a server with the OpenAI interface instead, e.g. http://127.0.0.1:8000 [default: NPUHAL_API_URL]
    #[arg(long, value_name = "URL")]
    pub(crate) api_url: Option<String>,

    /// Key of the server; sent encrypted, or to this machine [default: NPUHAL_API_KEY]
    #[arg(long, value_name = "KEY")]
    pub(crate) api_key: Option<String>,

    /// Items of a .json or .jsonl file: id, category, prompt, expected, max_tokens
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) dataset: Option<PathBuf>,

    /// Score the text of a file instead of asking
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, conflicts_with_all = ["dataset", "api_url", "min_accuracy", "min_tps"])]
    pub(crate) perplexity: Option<PathBuf>,

    /// Numerics that the others are held against
    #[arg(long, value_name = "NAME", requires = "perplexity")]
    pub(crate) reference: Option<String>,

    /// Model of the reference, e.g. the same weights unquantized [default: each model its own]
    #[arg(long, value_name = "MODEL", requires = "reference", value_hint = ValueHint::AnyPath)]
    pub(crate) reference_model: Option<OsString>,

    /// Positions of a window of the text
    #[arg(long, value_name = "N", default_value_t = DEFAULT_WINDOW, requires = "perplexity", value_parser = clap::value_parser!(u32).range(2..))]
    pub(crate) window: u32,

    /// Score only the first N tokens of the text
    #[arg(long, value_name = "N", requires = "perplexity")]
    pub(crate) tokens: Option<usize>,

    /// Form of the report
    #[arg(long, value_name = "FORM", default_value = "text")]
    pub(crate) format: ReportFormat,

    /// Write the report to a file
    #[arg(short, long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) output: Option<PathBuf>,

    /// A line for the report, e.g. where a text comes from (may be given several times)
    #[arg(long, value_name = "TEXT", requires = "perplexity")]
    pub(crate) note: Vec<String>,

    /// Highest perplexity that passes
    #[arg(long, value_name = "X")]
    pub(crate) max_perplexity: Option<f64>,

    /// Lowest share of matches that passes, 0 to 1
    #[arg(long, value_name = "X")]
    pub(crate) min_accuracy: Option<f64>,

    /// Lowest rate that passes, in generated tokens a second
    #[arg(long, value_name = "X")]
    pub(crate) min_tps: Option<f64>,

    /// Try the whole path, HTTP included, on a server inside this program that knows the answers
    #[arg(long, conflicts_with_all = ["models", "api_url", "api_key", "dataset", "perplexity"])]
    pub(crate) self_test: bool,
}

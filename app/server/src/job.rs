//! What a worker is asked, and what it answers: the typed messages between the HTTP process and the process that owns the
//! device.

use npuhal_models::logprobs::TokenLogprob;
use npuhal_models::sampling::SamplingParams;
use npuhal_models::stats::{FinishReason, GenerationStats};
use npuhal_models::template::ChatInput;
use npuhal_models::window::{PromptTruncation, Truncation};
use serde::{Deserialize, Serialize};

/// Number of a job, unique in its worker.
pub type JobId = u64;

/// What the answer is to.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum JobInput {
    /// A conversation, rendered by the model's template.
    Chat(Box<ChatInput>),
    /// A text to be continued.
    Text(String),
}

/// One request for one or several answers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Job {
    /// What the answer is to.
    pub input: JobInput,
    /// Tokens of each answer at most; `None` for as many as the context holds. Larger values are cut to the context.
    pub max_tokens: Option<u32>,
    /// Answers, one after the other.
    pub choices: u32,
    /// How tokens are chosen.
    pub sampling: SamplingParams,
    /// Strings that end the text, checked.
    pub stop: Vec<String>,
    /// Log probabilities with this many alternatives.
    pub logprobs: Option<u32>,
    /// Time the job may take in the worker, in milliseconds.
    pub time_limit_ms: u64,
}

/// Something that happened to a job. A job ends with exactly one of [`JobEvent::Finished`] and [`JobEvent::Failed`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum JobEvent {
    /// The prompt was accepted.
    Started {
        /// Its tokens.
        prompt_tokens: usize,
        /// What it lost to fit.
        truncation: PromptLoss,
    },
    /// Some of the prompt is computed.
    Prefill {
        /// Positions done.
        done: usize,
        /// Positions of the prompt.
        total: usize,
    },
    /// The device's context was lost by an earlier job and has been made anew for this one.
    ContextRebuilt,
    /// A part of an answer.
    Piece {
        /// Which answer, from 0.
        choice: u32,
        /// Text of the answer.
        text: String,
        /// Text of the thoughts before it.
        reasoning: String,
        /// Log probabilities that became due.
        logprobs: Vec<TokenLogprob>,
    },
    /// An answer is complete.
    ChoiceEnded {
        /// Which answer, from 0.
        choice: u32,
        /// Why it ended.
        finish_reason: FinishReason,
        /// Counts, times and the effective seed.
        stats: Box<GenerationStats>,
    },
    /// All answers are complete.
    Finished,
    /// The job ended early.
    Failed(JobFailure),
}

/// What a prompt lost to fit the context.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PromptLoss {
    /// A conversation.
    Chat(Truncation),
    /// A text.
    Text(PromptTruncation),
}

/// Why a job ended early. Texts for the client are in the variants; what is not for it goes to the log of the worker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum JobFailure {
    /// The prompt does not fit.
    ContextLengthExceeded {
        /// Tokens of the prompt.
        prompt_tokens: usize,
        /// Positions of a sequence.
        context: usize,
    },
    /// The request cannot be run as it is.
    Invalid {
        /// What is wrong, for the client.
        message: String,
        /// The field at fault, where it is one.
        param: Option<String>,
    },
    /// Its time was over.
    TimedOut,
    /// The caller gave it up.
    Cancelled,
    /// The device did not answer in time; the next job gets a fresh context.
    DeviceTimedOut,
    /// The device failed; the next job gets a fresh context.
    Device,
    /// The worker went away in the middle.
    WorkerLost,
}

/// Parent to worker.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Order {
    /// First of all: the model.
    Load(Load),
    /// A job.
    Run {
        /// Its number.
        id: JobId,
        /// The job.
        job: Box<Job>,
    },
    /// Stop a job at the next token.
    Cancel {
        /// Its number.
        id: JobId,
    },
    /// Are you there?
    Ping {
        /// Returned in the answer.
        number: u64,
    },
    /// End.
    Quit,
}

/// What a worker loads.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Load {
    /// File or directory of the model, as found by the host.
    pub model: String,
    /// Sequences that may run side by side.
    pub sequences: u32,
    /// Whether the model is tried before it is called ready.
    pub self_test: bool,
}

/// Worker to parent.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Report {
    /// The model is loaded and has passed its self-test.
    Ready(Resident),
    /// It cannot be loaded, or failed its self-test.
    LoadFailed {
        /// Why, for the operator.
        message: String,
        /// Whether it was loaded, and failed its self-test.
        is_self_test: bool,
    },
    /// Something happened to a job.
    Event {
        /// Its number.
        id: JobId,
        /// What.
        event: JobEvent,
    },
    /// The thread that reports runs on another core than before.
    Core {
        /// Number of the core.
        number: usize,
    },
    /// Answer to a ping.
    Pong {
        /// That of the ping.
        number: u64,
        /// Milliseconds since the last step of a running job; `None` where none runs.
        stalled_ms: Option<u64>,
    },
}

/// A loaded model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Resident {
    /// Route that runs it.
    pub route: String,
    /// Device that does the main part.
    pub device: String,
    /// Positions of a sequence.
    pub context: usize,
    /// Layers on an NPU.
    pub npu_layers: usize,
    /// Layers on the CPU.
    pub cpu_layers: usize,
    /// Jobs that can run side by side.
    pub parallel: u32,
}

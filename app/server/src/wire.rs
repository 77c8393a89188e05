//! The objects of the interface, as they go over the wire. Field names and meaning are OpenAI's; what is ours begins with
//! `x_npuhal_`.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

/// Body of `POST /v1/chat/completions`. Fields that are not listed are ignored; `null` counts as absent.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ChatRequest {
    /// Id of the model; the server's default without it.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(min_length = 1)]
    pub model: Option<String>,
    /// The conversation.
    #[schema(min_items = 1, max_items = 4096)]
    pub messages: Vec<Message>,
    /// Variables of the template, such as `enable_thinking`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Object>)]
    pub chat_template_kwargs: Option<Map<String, Value>>,
    /// Tokens of the answer at most; what the context holds without it.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1)]
    pub max_completion_tokens: Option<u64>,
    /// The older name of `max_completion_tokens`; only one of them can be given.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1)]
    pub max_tokens: Option<u64>,
    /// Log probabilities of the tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub logprobs: Option<bool>,
    /// Alternatives listed with each token; needs `logprobs`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 0, maximum = 20)]
    pub top_logprobs: Option<u32>,
    /// What both interfaces share.
    #[serde(flatten)]
    pub common: CommonRequest,
}

/// Body of `POST /v1/completions`. Fields that are not listed are ignored; `null` counts as absent.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct CompletionRequest {
    /// Id of the model; the server's default without it.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(min_length = 1)]
    pub model: Option<String>,
    /// The text to be continued.
    #[schema(min_length = 1)]
    pub prompt: String,
    /// Put the prompt in front of the text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub echo: Option<bool>,
    /// Tokens of the answer at most; 16 without it.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1)]
    pub max_tokens: Option<u64>,
    /// The newer name of `max_tokens`; only one of them can be given.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1)]
    pub max_completion_tokens: Option<u64>,
    /// Log probabilities: a boolean, or the number of alternatives from 0 to 5.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub logprobs: Option<TextLogprobsWish>,
    /// Alternatives listed with each token; needs `logprobs`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 0, maximum = 20)]
    pub top_logprobs: Option<u32>,
    /// Only equal to `n`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub best_of: Option<u32>,
    /// What both interfaces share.
    #[serde(flatten)]
    pub common: CommonRequest,
}

/// `logprobs` of a text completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(untagged)]
pub enum TextLogprobsWish {
    /// Whether there are any.
    Wanted(bool),
    /// With this many alternatives.
    Alternatives(u32),
}

/// Fields of both interfaces.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct CommonRequest {
    /// Answers; they are made side by side where the device can, and may come interleaved.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 8)]
    pub n: Option<u32>,
    /// Whether the answer comes as server-sent events.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stream: Option<bool>,
    /// Only with `stream`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stream_options: Option<StreamOptions>,
    /// Up to four texts of 1 to 256 characters that end the answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stop: Option<StopWish>,
    /// Randomness; 0, the default, takes the most probable token.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 0, maximum = 2)]
    pub temperature: Option<f64>,
    /// Keep the most probable tokens that reach this probability together.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(exclusive_minimum = 0, maximum = 1)]
    pub top_p: Option<f64>,
    /// Keep the K most probable tokens; 0 keeps all.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 0)]
    pub top_k: Option<u64>,
    /// Drop tokens less probable than this share of the best one.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 0, maximum = 1)]
    pub min_p: Option<f64>,
    /// Divide the logits of tokens seen before. Where it is absent, `repeat_penalty` is read.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 0.1, maximum = 2)]
    pub repetition_penalty: Option<f64>,
    /// Lower the logits of tokens seen before, once.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(minimum = -2, maximum = 2)]
    pub presence_penalty: Option<f64>,
    /// Lower the logits of tokens seen before, each time.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(minimum = -2, maximum = 2)]
    pub frequency_penalty: Option<f64>,
    /// Added to the logits of at most 1024 tokens, by their ids: -100 to 100.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<std::collections::BTreeMap<String, f64>>)]
    pub logit_bias: Option<Map<String, Value>>,
    /// Seed of the draws.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 0, maximum = 9223372036854775807u64)]
    pub seed: Option<u64>,
}

/// One turn of a conversation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Message {
    /// `system` (or `developer`), `user` or `assistant`.
    pub role: Role,
    /// What is said; may be `null` in a turn of the assistant.
    pub content: Option<Content>,
    /// The thoughts of an earlier answer, for templates that look for them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
    /// Who it is that speaks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(max_length = 64)]
    pub name: Option<String>,
}

/// Who speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// Instructions.
    System,
    /// The newer name of `system`.
    Developer,
    /// The person.
    User,
    /// The model.
    Assistant,
}

/// A text, whole or in parts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(untagged)]
pub enum Content {
    /// Whole.
    Text(String),
    /// In parts, which are joined by line breaks.
    Parts(Vec<TextPart>),
}

/// A part of a text.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TextPart {
    /// `text`.
    #[serde(rename = "type")]
    pub kind: TextPartKind,
    /// The text.
    pub text: String,
}

/// Kind of a part.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum TextPartKind {
    /// Text.
    Text,
}

/// Options of a stream.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct StreamOptions {
    /// Send the counts in a chunk of their own before the end.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub include_usage: Option<bool>,
    /// Taken and ignored: chunks are not padded.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub include_obfuscation: Option<bool>,
}

/// What ends an answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(untagged)]
pub enum StopWish {
    /// One text.
    One(String),
    /// Up to four.
    Several(Vec<String>),
}

/// Answer of `POST /v1/chat/completions`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ChatCompletion {
    /// `chatcmpl-` and the number of the request.
    pub id: String,
    /// `chat.completion`.
    pub object: String,
    /// Seconds since 1970.
    pub created: u64,
    /// Id of the model.
    pub model: String,
    /// The answers.
    pub choices: Vec<ChatChoice>,
    /// Counts.
    pub usage: Usage,
    /// Figures of the answer, of the last one of several.
    pub x_npuhal_stats: Option<Stats>,
}

/// One answer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ChatChoice {
    /// Which, from 0.
    pub index: u32,
    /// The turn.
    pub message: AssistantMessage,
    /// Log probabilities, where wanted.
    pub logprobs: Option<ChatLogprobs>,
    /// `stop` or `length`.
    pub finish_reason: Option<String>,
    /// Figures of this answer, where there are several.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub x_npuhal_stats: Option<Stats>,
}

/// The model's turn.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AssistantMessage {
    /// `assistant`.
    pub role: String,
    /// The answer.
    pub content: Option<String>,
    /// The thoughts before it, of models that think first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
    /// Always `null`.
    pub refusal: Option<String>,
}

/// A chunk of a streamed chat answer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ChatChunk {
    /// The same in all chunks.
    pub id: String,
    /// `chat.completion.chunk`.
    pub object: String,
    /// Seconds since 1970.
    pub created: u64,
    /// Id of the model.
    pub model: String,
    /// One part of one answer; none in the chunk with the counts.
    pub choices: Vec<ChunkChoice>,
    /// Absent unless wanted; `null` in all chunks but the last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Usage>)]
    pub usage: Option<Option<Usage>>,
    /// In the last chunk of each answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub x_npuhal_stats: Option<Stats>,
}

/// A part of one answer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ChunkChoice {
    /// Which answer, from 0.
    pub index: u32,
    /// What is new.
    pub delta: Delta,
    /// Log probabilities that became due.
    pub logprobs: Option<ChatLogprobs>,
    /// In the last chunk of the answer.
    pub finish_reason: Option<String>,
}

/// What is new.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Delta {
    /// In the first chunk of the answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub role: Option<String>,
    /// Of the answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub content: Option<String>,
    /// Of the thoughts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
}

/// Log probabilities of a chat answer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ChatLogprobs {
    /// One entry a token.
    pub content: Vec<TokenEntry>,
    /// Always `null`.
    pub refusal: Option<Vec<TokenEntry>>,
}

/// A token.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct TokenEntry {
    /// Its text; bytes that are no UTF-8 by themselves show as U+FFFD.
    pub token: String,
    /// Natural logarithm of its probability.
    pub logprob: f64,
    /// Its bytes.
    pub bytes: Option<Vec<u8>>,
    /// The most probable tokens in its place.
    pub top_logprobs: Vec<TopEntry>,
}

/// An alternative.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct TopEntry {
    /// Its text.
    pub token: String,
    /// Natural logarithm of its probability.
    pub logprob: f64,
    /// Its bytes.
    pub bytes: Option<Vec<u8>>,
}

/// Answer of `POST /v1/completions`, and each chunk of it when streamed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Completion {
    /// `cmpl-` and the number of the request.
    pub id: String,
    /// `text_completion`.
    pub object: String,
    /// Seconds since 1970.
    pub created: u64,
    /// Id of the model.
    pub model: String,
    /// The answers, or a part of one.
    pub choices: Vec<TextChoice>,
    /// Counts. In a stream absent unless wanted, and `null` in all chunks but the last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Usage>)]
    pub usage: Option<Option<Usage>>,
    /// Figures of the answer, of the last one of several; in a stream in the last chunk of each.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub x_npuhal_stats: Option<Stats>,
}

/// One answer, or a part of it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct TextChoice {
    /// Which, from 0.
    pub index: u32,
    /// The text.
    pub text: String,
    /// Log probabilities, where wanted.
    pub logprobs: Option<TextLogprobs>,
    /// `stop` or `length`.
    pub finish_reason: Option<String>,
    /// Figures of this answer, where there are several and they are not streamed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub x_npuhal_stats: Option<Stats>,
}

/// Log probabilities of a text; lists of one length.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct TextLogprobs {
    /// Texts of the tokens; bytes that are no UTF-8 by themselves as `bytes:\xf0\x9f`.
    pub tokens: Vec<String>,
    /// Natural logarithms of their probabilities.
    pub token_logprobs: Vec<f64>,
    /// The most probable tokens in their places.
    #[schema(value_type = Vec<Object>)]
    pub top_logprobs: Vec<Map<String, Value>>,
    /// Complete characters of the text before each.
    pub text_offset: Vec<usize>,
}

/// Counts, summed over the answers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Tokens of the answers.
    pub completion_tokens: usize,
    /// Both.
    pub total_tokens: usize,
    /// Details of the prompt.
    pub prompt_tokens_details: PromptTokensDetails,
}

/// Details of the prompt.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PromptTokensDetails {
    /// Tokens taken from the KV cache.
    pub cached_tokens: usize,
}

/// Figures of one answer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Stats {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Those taken from the KV cache.
    pub cached_prompt_tokens: usize,
    /// What the prompt lost to fit the context.
    pub prompt_truncation: PromptTruncation,
    /// Tokens of the answer.
    pub generated_tokens: usize,
    /// Layers on an NPU.
    pub npu_layers: usize,
    /// Layers on the CPU.
    pub cpu_layers: usize,
    /// The route.
    pub route: String,
    /// The device that does the main part.
    pub device: String,
    /// Why it ended, more exactly than `finish_reason` of the choice.
    pub finish_reason: String,
    /// The stop text that ended it.
    pub stop_sequence: Option<String>,
    /// Time to the first token, in the worker.
    pub ttft_seconds: f64,
    /// Prompt tokens computed, a second.
    pub prefill_tokens_per_second: Option<f64>,
    /// Intervals between tokens.
    pub decode_steps: usize,
    /// Their time.
    pub decode_seconds: f64,
    /// Tokens after the first, a second.
    pub decode_tokens_per_second: Option<f64>,
    /// How tokens were chosen.
    pub sampling: SamplingStats,
}

/// What a prompt lost to fit the context.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(untagged)]
pub enum PromptTruncation {
    /// A conversation.
    Chat(ChatTruncation),
    /// A text.
    Text(TextTruncation),
}

/// What a conversation lost.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ChatTruncation {
    /// Messages that are gone, a dropped system message included.
    pub dropped_messages: usize,
    /// The system message lost its end.
    pub truncated_system: bool,
    /// The system message is gone.
    pub dropped_system: bool,
    /// The newest message lost its beginning.
    pub truncated_content: bool,
    /// Only the end of the tokens is left.
    pub token_fallback: bool,
}

/// What a text lost.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TextTruncation {
    /// Its beginning is gone.
    pub truncated_prompt: bool,
}

/// How tokens were chosen.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct SamplingStats {
    /// `greedy` or `sampled`.
    pub mode: String,
    /// The effective seed, also where none was given; `null` where nothing is drawn.
    pub seed: Option<u64>,
    /// As asked.
    pub temperature: f64,
    /// As asked.
    pub top_p: f64,
    /// As asked.
    pub top_k: u64,
    /// As asked.
    pub min_p: f64,
    /// As asked.
    pub repetition_penalty: f64,
    /// As asked.
    pub presence_penalty: f64,
    /// As asked.
    pub frequency_penalty: f64,
}

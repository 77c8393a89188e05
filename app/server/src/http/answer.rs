//! Answers: what job events become, as one object or as a stream of chunks.

use super::error::ApiError;
use super::request::{Ask, Surface};
use crate::job::{JobFailure, PromptLoss, Resident};
use crate::wire::{
    AssistantMessage, ChatChoice, ChatChunk, ChatCompletion, ChatLogprobs, ChatTruncation, ChunkChoice, Completion,
    Delta, PromptTokensDetails, PromptTruncation, SamplingStats, Stats, TextChoice, TextLogprobs, TextTruncation,
    TokenEntry, TopEntry, Usage,
};
use npuhal_models::logprobs::{Alternative, TokenLogprob};
use npuhal_models::stats::{FinishReason, GenerationStats};
use serde::Serialize;
use serde_json::Value;

/// What all chunks of one answer share.
#[derive(Debug, Clone)]
pub(crate) struct Frame {
    pub(crate) surface: Surface,
    id: String,
    created: u64,
    model: String,
    include_usage: bool,
    wants_logprobs: bool,
    echo: Option<String>,
}

/// One answer or one chunk of it.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(untagged)]
pub(crate) enum Answer {
    Chat(ChatCompletion),
    Chunk(ChatChunk),
    Text(Completion),
}

/// A part of one answer.
#[derive(Debug, Clone, Default)]
struct Part<'a> {
    role: bool,
    text: Option<&'a str>,
    reasoning: &'a str,
    logprobs: &'a [TokenLogprob],
    /// Characters of the text that begin before it.
    offset: usize,
    finish: Option<FinishReason>,
}

impl Frame {
    pub(crate) fn new(ask: &Ask, id: &str, created: u64, model: &str) -> Self {
        let prefix = match ask.surface {
            Surface::Chat => "chatcmpl",
            Surface::Text => "cmpl",
        };
        Self {
            surface: ask.surface,
            id: format!("{prefix}-{id}"),
            created,
            model: model.to_owned(),
            include_usage: ask.include_usage,
            wants_logprobs: ask.logprobs.is_some(),
            echo: ask.echo.clone(),
        }
    }

    /// The text in front of each answer.
    pub(crate) fn echo(&self) -> &str {
        self.echo.as_deref().unwrap_or_default()
    }

    /// A chunk of a stream; without a choice the one that ends it with the counts.
    fn chunk(&self, part: Option<(u32, Part<'_>)>, usage: Option<Usage>, stats: Option<Stats>) -> Answer {
        let usage = self.include_usage.then_some(usage);
        let (id, created, model) = (self.id.clone(), self.created, self.model.clone());
        let word = |reason: FinishReason| reason.word().to_owned();
        match self.surface {
            Surface::Chat => {
                let choice = |(index, part): (u32, Part<'_>)| ChunkChoice {
                    index,
                    delta: Delta {
                        role: part.role.then(|| "assistant".to_owned()),
                        content: part.text.map(str::to_owned),
                        reasoning_content: (!part.reasoning.is_empty()).then(|| part.reasoning.to_owned()),
                    },
                    logprobs: self.has_logprobs(part.logprobs).then(|| chat_logprobs(part.logprobs)),
                    finish_reason: part.finish.map(word),
                };
                let choices = part.map(choice).into_iter().collect();
                let object = "chat.completion.chunk".to_owned();
                Answer::Chunk(ChatChunk { id, object, created, model, choices, usage, x_npuhal_stats: stats })
            }
            Surface::Text => {
                let choice = |(index, part): (u32, Part<'_>)| TextChoice {
                    index,
                    text: part.text.unwrap_or_default().to_owned(),
                    logprobs: self.has_logprobs(part.logprobs).then(|| text_logprobs(part.logprobs, part.offset)),
                    finish_reason: part.finish.map(word),
                    x_npuhal_stats: None,
                };
                let choices = part.map(choice).into_iter().collect();
                let object = "text_completion".to_owned();
                Answer::Text(Completion { id, object, created, model, choices, usage, x_npuhal_stats: stats })
            }
        }
    }

    fn has_logprobs(&self, entries: &[TokenLogprob]) -> bool {
        self.wants_logprobs && !entries.is_empty()
    }

    /// The chunk that opens a choice, where there is one.
    pub(crate) fn opening(&self, choice: u32) -> Option<Answer> {
        let part = match (self.surface, &self.echo) {
            (Surface::Chat, _) => Part { role: true, text: Some(""), ..Part::default() },
            (Surface::Text, Some(prompt)) => Part { text: Some(prompt), ..Part::default() },
            (Surface::Text, None) => return None,
        };
        Some(self.chunk(Some((choice, part)), None, None))
    }

    /// A piece; `offset` characters of text begin before it.
    pub(crate) fn piece(
        &self,
        choice: u32,
        text: &str,
        reasoning: &str,
        logprobs: &[TokenLogprob],
        offset: usize,
    ) -> Answer {
        let text = (!text.is_empty() || reasoning.is_empty()).then_some(text);
        let part = Part { text, reasoning, logprobs, offset, ..Part::default() };
        self.chunk(Some((choice, part)), None, None)
    }

    /// The chunk that ends a choice.
    pub(crate) fn ending(&self, choice: u32, reason: FinishReason, stats: Option<Stats>) -> Answer {
        self.chunk(Some((choice, Part { finish: Some(reason), ..Part::default() })), None, stats)
    }

    /// The chunk with the counts, where they are wanted.
    pub(crate) fn counts(&self, usage: Usage) -> Option<Answer> {
        self.include_usage.then(|| self.chunk(None, Some(usage), None))
    }

    /// The whole answer.
    pub(crate) fn whole(&self, choices: Vec<Choice>, usage: Usage) -> Answer {
        let (id, created, model) = (self.id.clone(), self.created, self.model.clone());
        let stats = choices.last().and_then(|choice| choice.stats.clone());
        let are_several = choices.len() > 1;
        let choices = (0..).zip(choices);
        match self.surface {
            Surface::Chat => {
                let choices = choices.map(|(index, choice)| ChatChoice {
                    index,
                    logprobs: self.wants_logprobs.then(|| chat_logprobs(&choice.logprobs)),
                    message: AssistantMessage {
                        role: "assistant".to_owned(),
                        content: Some(choice.text),
                        reasoning_content: Some(choice.reasoning).filter(|text| !text.is_empty()),
                        refusal: None,
                    },
                    finish_reason: choice.finish.map(|reason| reason.word().to_owned()),
                    x_npuhal_stats: choice.stats.filter(|_| are_several),
                });
                let (choices, object) = (choices.collect(), "chat.completion".to_owned());
                Answer::Chat(ChatCompletion { id, object, created, model, choices, usage, x_npuhal_stats: stats })
            }
            Surface::Text => {
                let before = self.echo().chars().count();
                let choices = choices.map(|(index, choice)| TextChoice {
                    index,
                    text: format!("{}{}", self.echo(), choice.text),
                    logprobs: self.wants_logprobs.then(|| text_logprobs(&choice.logprobs, before)),
                    finish_reason: choice.finish.map(|reason| reason.word().to_owned()),
                    x_npuhal_stats: choice.stats.filter(|_| are_several),
                });
                let (choices, object) = (choices.collect(), "text_completion".to_owned());
                let usage = Some(Some(usage));
                Answer::Text(Completion { id, object, created, model, choices, usage, x_npuhal_stats: stats })
            }
        }
    }
}

fn chat_logprobs(entries: &[TokenLogprob]) -> ChatLogprobs {
    let top = |alternative: &Alternative| TopEntry {
        token: alternative.token.clone(),
        logprob: alternative.logprob,
        bytes: Some(alternative.bytes.clone()),
    };
    let entry = |entry: &TokenLogprob| TokenEntry {
        token: entry.chosen.token.clone(),
        logprob: entry.chosen.logprob,
        bytes: Some(entry.chosen.bytes.clone()),
        top_logprobs: entry.top.iter().map(top).collect(),
    };
    ChatLogprobs { content: entries.iter().map(entry).collect(), refusal: None }
}

/// `begun` characters of text begin before the first token.
fn text_logprobs(entries: &[TokenLogprob], mut begun: usize) -> TextLogprobs {
    let mut text_offset = Vec::with_capacity(entries.len());
    for entry in entries {
        let bytes = &entry.chosen.bytes;
        // A token that goes on with a character stands where that one does.
        text_offset.push(begun.saturating_sub(usize::from(bytes.first().is_some_and(|&byte| continues(byte)))));
        begun += characters_begun(bytes);
    }
    let tops = |entry: &TokenLogprob| {
        entry.top.iter().map(|top| (text_token(&top.token, &top.bytes), Value::from(top.logprob))).collect()
    };
    TextLogprobs {
        tokens: entries.iter().map(|entry| text_token(&entry.chosen.token, &entry.chosen.bytes)).collect(),
        token_logprobs: entries.iter().map(|entry| entry.chosen.logprob).collect(),
        top_logprobs: entries.iter().map(tops).collect(),
        text_offset,
    }
}

/// A token of a text completion: where its bytes are no text by themselves, the bytes, as OpenAI writes them. As texts several
/// of them would be the same.
fn text_token(token: &str, bytes: &[u8]) -> String {
    if std::str::from_utf8(bytes).is_ok() {
        return token.to_owned();
    }
    bytes.iter().fold("bytes:".to_owned(), |text, byte| format!("{text}\\x{byte:02x}"))
}

/// Whether a byte of UTF-8 goes on with a character.
fn continues(byte: u8) -> bool {
    byte & 0xC0 == 0x80
}

/// Characters of UTF-8 that begin in `bytes`.
pub(crate) fn characters_begun(bytes: &[u8]) -> usize {
    bytes.iter().filter(|&&byte| !continues(byte)).count()
}

/// One complete answer.
#[derive(Debug, Clone, Default)]
pub(crate) struct Choice {
    pub(crate) text: String,
    pub(crate) reasoning: String,
    pub(crate) logprobs: Vec<TokenLogprob>,
    pub(crate) finish: Option<FinishReason>,
    pub(crate) stats: Option<Stats>,
}

/// `usage` with the counts of one more choice.
pub(crate) fn with_counts(usage: Usage, stats: &GenerationStats) -> Usage {
    let prompt_tokens = usage.prompt_tokens + stats.prompt_tokens;
    let completion_tokens = usage.completion_tokens + stats.generated_tokens;
    let cached_tokens = usage.prompt_tokens_details.cached_tokens + stats.cached_prompt_tokens;
    Usage {
        prompt_tokens,
        completion_tokens,
        total_tokens: prompt_tokens + completion_tokens,
        prompt_tokens_details: PromptTokensDetails { cached_tokens },
    }
}

/// What the prompt lost, as it is told.
fn truncation_of(loss: PromptLoss) -> PromptTruncation {
    match loss {
        PromptLoss::Chat(lost) => PromptTruncation::Chat(ChatTruncation {
            dropped_messages: lost.dropped_messages,
            truncated_system: lost.truncated_system,
            dropped_system: lost.dropped_system,
            truncated_content: lost.truncated_content,
            token_fallback: lost.token_fallback,
        }),
        PromptLoss::Text(lost) => PromptTruncation::Text(TextTruncation { truncated_prompt: lost.truncated_prompt }),
    }
}

/// The figures of one choice.
pub(crate) fn stats_of(stats: &GenerationStats, resident: &Resident, loss: PromptLoss) -> Stats {
    let sampling = &stats.sampling;
    Stats {
        prompt_tokens: stats.prompt_tokens,
        cached_prompt_tokens: stats.cached_prompt_tokens,
        prompt_truncation: truncation_of(loss),
        generated_tokens: stats.generated_tokens,
        npu_layers: resident.npu_layers,
        cpu_layers: resident.cpu_layers,
        route: resident.route.clone(),
        device: resident.device.clone(),
        finish_reason: stats.finish_reason.to_string(),
        stop_sequence: stats.stop_sequence.clone(),
        ttft_seconds: stats.ttft.as_secs_f64(),
        prefill_tokens_per_second: stats.prefill_tokens_per_second(),
        decode_steps: stats.decode_steps,
        decode_seconds: stats.decode_time.as_secs_f64(),
        decode_tokens_per_second: stats.decode_tokens_per_second(),
        sampling: SamplingStats {
            mode: if sampling.draws() { "sampled" } else { "greedy" }.to_owned(),
            seed: sampling.seed,
            temperature: sampling.temperature,
            top_p: sampling.top_p,
            top_k: sampling.top_k,
            min_p: sampling.min_p,
            repetition_penalty: sampling.repetition_penalty,
            presence_penalty: sampling.presence_penalty,
            frequency_penalty: sampling.frequency_penalty,
        },
    }
}

/// What a client is told of a failed job.
pub(crate) fn error_of(failure: &JobFailure, surface: Surface) -> ApiError {
    match failure {
        JobFailure::ContextLengthExceeded { prompt_tokens, context } => {
            let param = if surface == Surface::Chat { "messages" } else { "prompt" };
            ApiError::context_length(*prompt_tokens, *context, param)
        }
        JobFailure::Invalid { message, param: Some(param) } => ApiError::invalid(param.clone(), message.clone()),
        JobFailure::Invalid { message, param: None } => ApiError::bad_body("invalid_request", message.clone()),
        JobFailure::TimedOut => ApiError::timed_out(),
        JobFailure::DeviceTimedOut => ApiError::device_timed_out(),
        JobFailure::WorkerLost => ApiError::worker_lost(),
        // A client that still listens did not cancel: the service ends, and its patience with it.
        JobFailure::Cancelled => ApiError::shutting_down(),
        JobFailure::Device => ApiError::internal(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tokens that are parts of a character had offsets behind the end of the text, and as alternatives were one.
    #[test]
    fn offsets_and_alternatives_of_parts_of_a_character() {
        let token = |bytes: &[u8]| Alternative {
            id: 0,
            token: String::from_utf8_lossy(bytes).into_owned(),
            logprob: -1.0,
            bytes: bytes.to_vec(),
        };
        // "aé👋b" in six tokens.
        let parts: [&[u8]; 6] = [b"a", b"\xc3", b"\xa9", b"\xf0\x9f\x91", b"\x8b", b"b"];
        let top = vec![token(b"\xf0\x9f"), token(b"\xf0"), token(b"x")];
        let entries = parts.map(|bytes| TokenLogprob { chosen: token(bytes), top: top.clone() });
        let logprobs = text_logprobs(&entries, 2);
        assert_eq!(logprobs.text_offset, [2, 3, 3, 4, 4, 5]);
        assert_eq!(logprobs.tokens[3..], ["bytes:\\xf0\\x9f\\x91", "bytes:\\x8b", "b"]);
        assert_eq!(logprobs.top_logprobs[0].len(), 3);
        // In pieces, as a stream tells them.
        let begun = characters_begun(b"a\xc3");
        assert_eq!(text_logprobs(&entries[2..], 2 + begun).text_offset, [3, 4, 4, 5]);
    }
}

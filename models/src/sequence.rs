//! One sequence as a state machine: which rows it needs next, and what a row of its logits leads to.
//!
//! A [`Sequence`] knows nothing of the stepper that computes its rows. One loop drives one sequence ([`crate::generate`]); a
//! batching scheduler may put the rows of several sequences into one step and hand each its own row of logits.

use crate::detokenizer::StreamDetokenizer;
use crate::logprobs::{self, MAX_TOP_LOGPROBS, TokenLogprob};
use crate::sampling::{Sampler, SamplingError, SamplingParams};
use crate::stats::{FinishReason, GenerationStats};
use crate::stop::{StopMatcher, StopStrings};
use crate::tokenizer::{ControlTokens, Tokenizer};
use npuhal_core::RunError;
use npuhal_core::stage::{Row, SequenceId, TokenId};
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::collections::VecDeque;
use std::time::{Duration, Instant};
use thiserror::Error;

/// Token ids as text; what a generation needs of a tokenizer.
pub trait TokenText: Send + Sync {
    /// Whether `id` ends a text.
    fn is_eos(&self, id: TokenId) -> bool;

    /// Whether `id` is a control token, which has no text in the output.
    fn is_control(&self, id: TokenId) -> bool;

    /// The bytes that `id` stands for.
    fn token_bytes(&self, id: TokenId) -> Cow<'_, [u8]>;

    /// A detokenizer for what follows a prompt.
    fn stream(&self) -> Box<dyn TextStream + '_>;

    /// Ids from this one on are only padding: a model may have rows of logits for them, but they stand for nothing and are
    /// never chosen.
    fn usable_ids(&self) -> usize {
        usize::MAX
    }
}

/// Turns a stream of ids into text, cut at character borders.
pub trait TextStream: Send {
    /// The text that is certain once `id` is known; may be empty.
    fn push(&mut self, id: TokenId) -> String;

    /// The rest at the end of the stream.
    fn flush(&mut self) -> String;
}

impl TokenText for Tokenizer {
    fn is_eos(&self, id: TokenId) -> bool {
        self.is_eos(id)
    }

    fn is_control(&self, id: TokenId) -> bool {
        self.is_control(id)
    }

    fn token_bytes(&self, id: TokenId) -> Cow<'_, [u8]> {
        Cow::Owned(self.token_bytes(id).unwrap_or_default())
    }

    fn stream(&self) -> Box<dyn TextStream + '_> {
        Box::new(StreamDetokenizer::continuing(self, ControlTokens::Hide))
    }

    fn usable_ids(&self) -> usize {
        self.usable_ids()
    }
}

impl TextStream for StreamDetokenizer {
    fn push(&mut self, id: TokenId) -> String {
        self.push(id)
    }

    fn flush(&mut self) -> String {
        self.flush()
    }
}

/// A request that cannot be run as it is; found before any work.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum RequestError {
    /// No ids at all.
    #[error("the prompt is empty; wanted at least one token")]
    EmptyPrompt,
    /// More ids than positions.
    #[error(
        "the prompt has {prompt_tokens} tokens, but there are {positions} positions; shorten it or use a longer context"
    )]
    PromptTooLong {
        /// Tokens of the prompt.
        prompt_tokens: usize,
        /// Prompt tokens that fit.
        positions: usize,
    },
    /// An id that the model has no embedding for.
    #[error("token {token} at position {position} of the prompt is outside the vocabulary of {vocab_size}")]
    UnknownToken {
        /// The id.
        token: TokenId,
        /// Its position.
        position: usize,
        /// Ids that the model has.
        vocab_size: usize,
    },
    /// No token wanted.
    #[error("max_tokens must be a positive integer; found 0")]
    NoTokens,
    /// Too many alternatives.
    #[error("top_logprobs must be between 0 and {limit}; found {found}")]
    TopLogprobs {
        /// What was given.
        found: usize,
        /// [`MAX_TOP_LOGPROBS`].
        limit: usize,
    },
    /// The sequence number is not one of the session's.
    #[error("sequence {found}, but the session holds {sequences} (numbered from 0)")]
    UnknownSequence {
        /// What was given.
        found: u32,
        /// Sequences of the session.
        sequences: u32,
    },
    /// A sampling parameter.
    #[error(transparent)]
    Sampling(#[from] SamplingError),
    /// A route that chooses tokens itself cannot do this.
    #[error("this route chooses tokens itself and cannot do {feature}; leave it out or use another device")]
    NotOnThisRoute {
        /// What was asked for.
        feature: &'static str,
    },
}

/// What to generate.
#[derive(Debug, Clone, PartialEq)]
pub struct GenerationRequest {
    /// Prompt ids.
    pub prompt: Vec<TokenId>,
    /// Tokens to emit at most; at least 1.
    pub max_tokens: usize,
    /// How tokens are chosen.
    pub sampling: SamplingParams,
    /// Strings that end the text.
    pub stop: StopStrings,
    /// Log probabilities with this many alternatives, up to [`MAX_TOP_LOGPROBS`].
    pub logprobs: Option<usize>,
    /// Emit and feed end-of-text tokens like others (for measurements).
    pub ignore_eos: bool,
}

impl GenerationRequest {
    /// A greedy request without stop strings.
    #[must_use]
    pub fn greedy(prompt: Vec<TokenId>, max_tokens: usize) -> Self {
        Self {
            prompt,
            max_tokens,
            sampling: SamplingParams::default(),
            stop: StopStrings::default(),
            logprobs: None,
            ignore_eos: false,
        }
    }
}

/// A piece of the answer.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Piece {
    /// Text, cut at character borders; may be empty where there are log probabilities.
    pub text: String,
    /// Tokens emitted since the piece before. Tokens whose text never came out (a stop string) are in no piece.
    pub tokens: Vec<TokenId>,
    /// Log probabilities that became due: those of tokens whose first byte has been given out, at the end all.
    pub logprobs: Vec<TokenLogprob>,
}

/// Limits of the session that a sequence runs in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SequenceLimits {
    /// Positions of a sequence.
    pub positions: usize,
    /// Ids that the model has.
    pub vocab_size: usize,
}

/// The state of one sequence.
pub struct Sequence<'t> {
    id: SequenceId,
    limits: SequenceLimits,
    tokens: Vec<TokenId>,
    prompt_tokens: usize,
    cached: usize,
    computed: usize,
    max_tokens: usize,
    ignore_eos: bool,
    sampler: Sampler,
    tokenizer: &'t dyn TokenText,
    stream: Box<dyn TextStream + 't>,
    stop: StopMatcher,
    output: String,
    unreported: usize,
    entries: Entries,
    finish: Option<FinishReason>,
    ttft: Duration,
    decode_time: Duration,
}

impl<'t> Sequence<'t> {
    /// A sequence of which nothing is computed.
    ///
    /// # Errors
    /// Whatever is wrong with the request; nothing has been done then.
    pub fn new(
        id: SequenceId,
        request: &GenerationRequest,
        tokenizer: &'t dyn TokenText,
        limits: SequenceLimits,
    ) -> Result<Self, RequestError> {
        check_request(request, limits)?;
        let mut sampler = Sampler::new(request.sampling.clone())?;
        request.prompt.iter().for_each(|&token| sampler.accept(token));
        Ok(Self {
            id,
            limits,
            tokens: request.prompt.clone(),
            prompt_tokens: request.prompt.len(),
            cached: 0,
            computed: 0,
            max_tokens: request.max_tokens,
            ignore_eos: request.ignore_eos,
            sampler,
            tokenizer,
            stream: tokenizer.stream(),
            stop: StopMatcher::new(request.stop.clone()),
            output: String::new(),
            unreported: request.prompt.len(),
            entries: Entries::new(request.logprobs),
            finish: None,
            ttft: Duration::ZERO,
            decode_time: Duration::ZERO,
        })
    }

    /// The first `positions` of the prompt are already computed. The last one never counts as such.
    pub fn resume_from(&mut self, positions: usize) {
        self.cached = positions.min(self.prompt_tokens - 1);
        self.computed = self.cached;
    }

    /// Its number in the session.
    #[must_use]
    pub fn id(&self) -> SequenceId {
        self.id
    }

    /// Tokens of the prompt.
    #[must_use]
    pub fn prompt_tokens(&self) -> usize {
        self.prompt_tokens
    }

    /// Positions computed so far.
    #[must_use]
    pub fn computed(&self) -> usize {
        self.computed
    }

    /// Whether the prompt is not yet computed.
    #[must_use]
    pub fn in_prefill(&self) -> bool {
        self.computed < self.prompt_tokens
    }

    /// Tokens emitted so far.
    #[must_use]
    pub fn generated(&self) -> &[TokenId] {
        &self.tokens[self.prompt_tokens..]
    }

    /// Text given out so far.
    #[must_use]
    pub fn text(&self) -> &str {
        &self.output
    }

    /// Why it ended, once it has.
    #[must_use]
    pub fn finish_reason(&self) -> Option<FinishReason> {
        self.finish
    }

    /// Appends the next rows to compute, at most `limit`; true where logits of the last of them are wanted. No rows once
    /// the sequence has ended.
    pub fn push_rows(&self, limit: usize, rows: &mut Vec<Row>) -> bool {
        if self.finish.is_some() {
            return false;
        }
        let end = self.tokens.len().min(self.computed.saturating_add(limit.max(1)));
        rows.extend((self.computed..end).map(|position| Row {
            sequence: self.id,
            token: self.tokens[position],
            position: position as u32,
        }));
        end == self.tokens.len()
    }

    /// The next `rows` positions were computed by a step that began at `started`; `logits` are those of the last of them,
    /// where they were wanted. Chooses the next token and returns the piece that it completes.
    ///
    /// # Errors
    /// [`RunError::NotFinite`], [`RunError::BadRows`]; the sequence has not advanced then.
    pub fn step(&mut self, rows: usize, logits: Option<&[f32]>, started: Instant) -> Result<Option<Piece>, RunError> {
        let prefill = self.in_prefill();
        let emitted = self.generated().len();
        let piece = match logits {
            Some(logits) => self.choose(logits)?,
            None => None,
        };
        self.computed += rows;
        if prefill {
            self.ttft += started.elapsed();
        } else if self.generated().len() > emitted {
            self.decode_time += started.elapsed();
        }
        Ok(piece)
    }

    /// Takes a token that somebody else chose. Log probabilities are not available for it.
    pub fn take(&mut self, token: TokenId) -> Option<Piece> {
        if self.finish.is_some() {
            return None;
        }
        if self.tokenizer.is_eos(token) && !self.ignore_eos {
            return self.end(FinishReason::EndOfText);
        }
        self.emit(token)
    }

    /// Ends the sequence for `reason` and returns what was held back.
    pub fn end(&mut self, reason: FinishReason) -> Option<Piece> {
        let rest = self.stream.flush();
        let mut text = self.stop.push(&rest);
        self.close(reason, &mut text);
        self.piece(text)
    }

    /// Sets times that somebody else measured.
    pub fn set_times(&mut self, cached: usize, ttft: Duration, decode_time: Duration) {
        self.cached = cached.min(self.prompt_tokens);
        self.ttft = ttft;
        self.decode_time = decode_time;
    }

    /// Counts and times so far.
    #[must_use]
    pub fn stats(&self) -> GenerationStats {
        let generated_tokens = self.generated().len();
        GenerationStats {
            prompt_tokens: self.prompt_tokens,
            cached_prompt_tokens: self.cached,
            generated_tokens,
            finish_reason: self.finish.unwrap_or(FinishReason::Receiver),
            stop_sequence: self.stop.matched().map(str::to_owned),
            ttft: self.ttft,
            decode_steps: generated_tokens.saturating_sub(1),
            decode_time: self.decode_time,
            sampling: SamplingParams { seed: self.sampler.seed(), ..self.sampler.params().clone() },
        }
    }

    fn choose(&mut self, logits: &[f32]) -> Result<Option<Piece>, RunError> {
        if logits.len() != self.limits.vocab_size {
            return Err(RunError::BadRows {
                reason: format!("wanted {} logits, found {}", self.limits.vocab_size, logits.len()),
            });
        }
        let logits = &logits[..logits.len().min(self.tokenizer.usable_ids())];
        let token = self.sampler.select(logits)?;
        if let Some(top) = self.entries.top
            && (self.ignore_eos || !self.tokenizer.is_eos(token))
        {
            let bytes_of = |id| self.tokenizer.token_bytes(id).into_owned();
            let entry = logprobs::token_logprob(logits, token, top, bytes_of)?;
            self.entries.waiting.push_back((self.entries.generated_bytes, entry));
        }
        Ok(self.take(token))
    }

    fn emit(&mut self, token: TokenId) -> Option<Piece> {
        self.tokens.push(token);
        self.sampler.accept(token);
        if !self.tokenizer.is_control(token) {
            self.entries.generated_bytes += self.tokenizer.token_bytes(token).len();
        }
        let text = self.stream.push(token);
        let mut text = self.stop.push(&text);
        let reason = if self.stop.matched().is_some() {
            Some(FinishReason::StopString)
        } else if self.generated().len() >= self.max_tokens {
            Some(FinishReason::MaxTokens)
        } else if self.tokens.len() > self.limits.positions {
            Some(FinishReason::ContextFull)
        } else {
            None
        };
        if let Some(reason) = reason {
            let rest = self.stream.flush();
            text.push_str(&self.stop.push(&rest));
            self.close(reason, &mut text);
        }
        self.piece(text)
    }

    /// Ends the text: a stop string that the last characters completed wins over `reason`.
    fn close(&mut self, reason: FinishReason, text: &mut String) {
        if self.stop.matched().is_some() {
            self.finish = Some(FinishReason::StopString);
        } else {
            text.push_str(&self.stop.flush());
            self.finish = Some(reason);
        }
    }

    fn piece(&mut self, text: String) -> Option<Piece> {
        self.output.push_str(&text);
        let all = self.finish.is_some() && self.stop.matched().is_none();
        let logprobs = self.entries.due(self.output.len(), all);
        if text.is_empty() && logprobs.is_empty() {
            return None;
        }
        let tokens = self.tokens[self.unreported..].to_vec();
        self.unreported = self.tokens.len();
        Some(Piece { text, tokens, logprobs })
    }
}

/// Log probabilities that wait for their text.
struct Entries {
    top: Option<usize>,
    waiting: VecDeque<(usize, TokenLogprob)>,
    generated_bytes: usize,
}

impl Entries {
    fn new(top: Option<usize>) -> Self {
        Self { top, waiting: VecDeque::new(), generated_bytes: 0 }
    }

    /// Those whose start lies before the end of the text that was given out, or all.
    fn due(&mut self, emitted_bytes: usize, all: bool) -> Vec<TokenLogprob> {
        let mut due = Vec::new();
        while self.waiting.front().is_some_and(|(start, _)| all || *start < emitted_bytes) {
            due.extend(self.waiting.pop_front().map(|(_, entry)| entry));
        }
        due
    }
}

fn check_request(request: &GenerationRequest, limits: SequenceLimits) -> Result<(), RequestError> {
    let prompt_tokens = request.prompt.len();
    if prompt_tokens == 0 {
        return Err(RequestError::EmptyPrompt);
    }
    if prompt_tokens > limits.positions {
        return Err(RequestError::PromptTooLong { prompt_tokens, positions: limits.positions });
    }
    if let Some(position) = request.prompt.iter().position(|&token| token as usize >= limits.vocab_size) {
        let token = request.prompt[position];
        return Err(RequestError::UnknownToken { token, position, vocab_size: limits.vocab_size });
    }
    if request.max_tokens == 0 {
        return Err(RequestError::NoTokens);
    }
    match request.logprobs {
        Some(found) if found > MAX_TOP_LOGPROBS => Err(RequestError::TopLogprobs { found, limit: MAX_TOP_LOGPROBS }),
        _ => Ok(()),
    }
}

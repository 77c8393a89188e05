//! One sequence as a state machine: which rows it needs next, and what a row of its logits leads to.
//!
//! A [`Sequence`] knows nothing of the stepper that computes its rows. One loop drives one sequence ([`crate::generate`]); the
//! scheduler of [`crate::batch`] puts the rows of several sequences into one step and hands each its own rows of logits.

use crate::detokenizer::StreamDetokenizer;
use crate::logprobs::{self, MAX_TOP_LOGPROBS, TokenLogprob};
use crate::sampling::{Sampler, SamplingError, SamplingParams};
use crate::speculate::{Speculation, Speculator};
use crate::stats::{FinishReason, GenerationStats};
use crate::stop::{StopMatcher, StopStrings};
use crate::thinking::{Thinking, ThoughtParser, Thoughts};
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
    /// A bias for an id that the model has no logit for.
    #[error("logit_bias names token {token}, which is outside the vocabulary of {vocab_size}")]
    UnknownBias {
        /// The id.
        token: TokenId,
        /// Ids that the model has.
        vocab_size: usize,
    },
    /// Choices to one request.
    #[error("n must be between 1 and {limit}; found {found}")]
    Choices {
        /// What was given.
        found: usize,
        /// [`crate::generate::MAX_CHOICES`].
        limit: usize,
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
    /// The prompt, given out in front of the answer.
    pub echo: Option<Echo>,
    /// How thoughts are told from the answer; `None` takes all text for the answer.
    pub thinking: Option<Thinking>,
    /// Whether and how tokens are guessed ahead. The output is the same.
    pub speculation: Option<Speculation>,
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
            echo: None,
            thinking: None,
            speculation: None,
            ignore_eos: false,
        }
    }

    /// Whether log probabilities of the prompt are wanted, so that all its positions must be computed.
    #[must_use]
    pub fn scores_prompt(&self) -> bool {
        self.logprobs.is_some() && self.echo.as_ref().is_some_and(|echo| echo.is_scored)
    }
}

/// The prompt as a part of the answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Echo {
    /// Its text.
    pub text: String,
    /// With log probabilities of its tokens, all but the first, where [`GenerationRequest::logprobs`] asks for them. Nothing
    /// of the prompt is taken from the KV cache then.
    pub is_scored: bool,
}

/// A piece of the answer.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Piece {
    /// Text, cut at character borders; may be empty where there are thoughts or log probabilities.
    pub text: String,
    /// Text of thoughts, where the request told how they are known.
    pub reasoning: String,
    /// Tokens emitted since the piece before. Tokens whose text never came out (a stop string) are in no piece.
    pub tokens: Vec<TokenId>,
    /// Log probabilities that became due: those of tokens whose first byte has been given out, at the end all.
    pub logprobs: Vec<TokenLogprob>,
    /// Whether this is the prompt and not yet the answer. Its first token has no log probability.
    pub is_echo: bool,
}

/// Limits of the session that a sequence runs in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SequenceLimits {
    /// Positions of a sequence.
    pub positions: usize,
    /// Ids that the model has.
    pub vocab_size: usize,
}

/// Rows that a sequence has put into a step.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Share {
    /// Rows.
    pub rows: usize,
    /// For how many of them logits are wanted.
    pub wanted: usize,
}

/// The state of one sequence.
///
/// A step goes like this: [`Sequence::push_rows`]; compute; [`Sequence::rows_computed`]; then, for each row of logits in
/// order and as long as [`Sequence::wants_logits`], [`Sequence::take_logits`]; [`Sequence::end_step`]. Afterwards positions
/// from [`Sequence::computed`] on are not valid in the KV cache.
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
    thoughts: Option<ThoughtState>,
    speculator: Option<Speculator>,
    echo: Option<Echo>,
    scored: Vec<TokenLogprob>,
    scores_prompt: bool,
    text: String,
    reasoning: String,
    unreported: usize,
    entries: Entries,
    finish: Option<FinishReason>,
    step: Step,
    ttft: Duration,
    decode_time: Duration,
}

/// What is under way between [`Sequence::push_rows`] and [`Sequence::end_step`].
#[derive(Default)]
struct Step {
    /// Rows of tokens that are known.
    known: usize,
    drafts: Vec<TokenId>,
    accepted: usize,
    /// Position of the row whose logits come next.
    cursor: Option<usize>,
    is_prefill: bool,
    forward_time: Duration,
    /// Time that no token has accounted for yet.
    open_time: Duration,
}

struct ThoughtState {
    parser: ThoughtParser,
    budget: Option<usize>,
    closing: Vec<TokenId>,
    tokens: usize,
    is_closed: bool,
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
        let thoughts = request.thinking.as_ref().map(|thinking| ThoughtState {
            parser: ThoughtParser::new(thinking.opened),
            budget: thinking.budget,
            closing: thinking.closing.clone(),
            tokens: 0,
            is_closed: false,
        });
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
            thoughts,
            speculator: request.speculation.map(Speculator::new),
            echo: request.echo.clone(),
            scored: Vec::new(),
            scores_prompt: request.scores_prompt(),
            text: String::new(),
            reasoning: String::new(),
            unreported: request.prompt.len(),
            entries: Entries::new(request.logprobs),
            finish: None,
            step: Step::default(),
            ttft: Duration::ZERO,
            decode_time: Duration::ZERO,
        })
    }

    /// The first `positions` of the prompt are already computed. The last one never counts as such, and none does where the
    /// prompt is scored. Returns how many count.
    pub fn resume_from(&mut self, positions: usize) -> usize {
        self.cached = if self.scores_prompt { 0 } else { positions.min(self.prompt_tokens - 1) };
        self.computed = self.cached;
        self.cached
    }

    /// Positions from `position` on are no longer computed and will be again.
    pub fn rewind(&mut self, position: usize) {
        self.computed = self.computed.min(position);
    }

    /// Its number in the session.
    #[must_use]
    pub fn id(&self) -> SequenceId {
        self.id
    }

    /// Prompt and emitted tokens.
    #[must_use]
    pub fn tokens(&self) -> &[TokenId] {
        &self.tokens
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

    /// Text given out so far, without thoughts and with the prompt where it is echoed.
    #[must_use]
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Thoughts given out so far.
    #[must_use]
    pub fn reasoning(&self) -> &str {
        &self.reasoning
    }

    /// Why it ended, once it has.
    #[must_use]
    pub fn finish_reason(&self) -> Option<FinishReason> {
        self.finish
    }

    /// The prompt as a piece, once, where it is echoed and all that belongs to it is known.
    pub fn take_echo(&mut self) -> Option<Piece> {
        if self.scores_prompt && self.scored.len() + 1 < self.prompt_tokens {
            return None;
        }
        let text = self.echo.take()?.text;
        self.text.push_str(&text);
        let tokens = self.tokens[..self.prompt_tokens].to_vec();
        Some(Piece { text, tokens, logprobs: std::mem::take(&mut self.scored), is_echo: true, ..Piece::default() })
    }

    /// Appends the next rows to compute, at most `limit` and of these at most `drafts` of drafted tokens, and for each whether
    /// its logits are wanted. No rows once the sequence has ended.
    pub fn push_rows(&mut self, limit: usize, drafts: usize, rows: &mut Vec<Row>, wanted: &mut Vec<bool>) -> Share {
        self.step.drafts.clear();
        self.step.accepted = 0;
        self.step.cursor = None;
        self.step.known = 0;
        if self.finish.is_some() {
            return Share::default();
        }
        let end = self.tokens.len().min(self.computed.saturating_add(limit.max(1)));
        let known = end - self.computed;
        let before = rows.len();
        let row = |position: usize, token| Row { sequence: self.id, token, position: position as u32 };
        for position in self.computed..end {
            rows.push(row(position, self.tokens[position]));
            wanted.push(position + 1 == self.tokens.len() || self.scores_prompt && position + 1 < self.prompt_tokens);
        }
        if end == self.tokens.len() && !self.in_prefill() {
            // The last token that may still be emitted is never fed.
            let emitted = self.tokens.len() - self.prompt_tokens;
            let room = (self.limits.positions - self.tokens.len().min(self.limits.positions))
                .min(self.max_tokens.saturating_sub(emitted + 1));
            let room = room.min(limit.saturating_sub(known)).min(drafts);
            if let Some(speculator) = &mut self.speculator {
                speculator.draft(&self.tokens, room, &mut self.step.drafts);
            }
            for (index, &token) in self.step.drafts.iter().enumerate() {
                rows.push(row(end + index, token));
                wanted.push(true);
            }
        }
        self.step.known = known;
        let wanted = &wanted[before..];
        self.step.cursor = wanted.iter().position(|&wanted| wanted).map(|first| self.computed + first);
        Share { rows: rows.len() - before, wanted: wanted.iter().filter(|&&wanted| wanted).count() }
    }

    /// The rows of the step are computed, which took `took`.
    pub fn rows_computed(&mut self, took: Duration) {
        self.step.is_prefill = self.in_prefill();
        self.step.forward_time = took;
        self.step.open_time = Duration::ZERO;
        self.computed += self.step.known;
        self.account(took);
    }

    /// Whether a further row of logits of this step is of use.
    #[must_use]
    pub fn wants_logits(&self) -> bool {
        self.finish.is_none() && self.step.cursor.is_some()
    }

    /// The logits of the step's next row. Chooses a token, or scores one of the prompt, and returns the piece that it completes.
    ///
    /// # Errors
    /// [`RunError::NotFinite`], [`RunError::BadRows`]; nothing was chosen then.
    pub fn take_logits(&mut self, logits: &[f32]) -> Result<Option<Piece>, RunError> {
        let Some(cursor) = self.step.cursor else { return Ok(None) };
        if logits.len() != self.limits.vocab_size {
            return Err(RunError::BadRows {
                reason: format!("wanted {} logits, found {}", self.limits.vocab_size, logits.len()),
            });
        }
        let started = Instant::now();
        let logits = &logits[..logits.len().min(self.tokenizer.usable_ids())];
        if cursor + 1 < self.prompt_tokens {
            // Positions may be computed again; their tokens are scored once.
            if self.scored.len() == cursor {
                let entry = self.entry(logits, self.tokens[cursor + 1])?;
                self.scored.extend(entry);
            }
            self.step.cursor = Some(cursor + 1).filter(|&next| next < self.computed);
            self.account(started.elapsed());
            return Ok(None);
        }
        let emitted = self.generated().len();
        let piece = self.choose(logits)?;
        // The draft came true: its row's logits are the next ones.
        let draft = self.step.drafts.get(self.step.accepted);
        let came_true = draft.is_some_and(|draft| self.tokens.len() == cursor + 2 && self.tokens[cursor + 1] == *draft);
        self.step.cursor = None;
        if came_true {
            self.step.accepted += 1;
            self.computed += 1;
            self.step.cursor = Some(cursor + 1).filter(|_| self.finish.is_none());
        }
        self.account(started.elapsed());
        if !self.step.is_prefill && self.generated().len() > emitted {
            self.decode_time += std::mem::take(&mut self.step.open_time);
        }
        Ok(piece)
    }

    /// Ends the step, also one whose logits were not all taken. `is_alone` where it held the rows of this sequence only.
    pub fn end_step(&mut self, is_alone: bool) {
        let step = &self.step;
        // Passes over other rows too, or over several known ones, are no measure of plain steps.
        if let Some(speculator) = &mut self.speculator
            && is_alone
            && !step.is_prefill
            && step.known == 1
        {
            speculator.observe(step.drafts.len(), step.accepted, step.forward_time);
        }
        self.step.cursor = None;
        self.step.drafts.clear();
        self.step.known = 0;
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
        let mut told = Thoughts::default();
        self.close(reason, &mut told);
        self.piece(told)
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
            reasoning_tokens: self.thoughts.as_ref().map_or(0, |thoughts| thoughts.tokens),
            finish_reason: self.finish.unwrap_or(FinishReason::Receiver),
            stop_sequence: self.stop.matched().map(str::to_owned),
            ttft: self.ttft,
            decode_steps: generated_tokens.saturating_sub(1),
            decode_time: self.decode_time,
            speculation: self.speculator.as_ref().map(Speculator::stats),
            sampling: SamplingParams { seed: self.sampler.seed(), ..self.sampler.params().clone() },
        }
    }

    fn account(&mut self, took: Duration) {
        if self.step.is_prefill {
            self.ttft += took;
        } else {
            self.step.open_time += took;
        }
    }

    fn choose(&mut self, logits: &[f32]) -> Result<Option<Piece>, RunError> {
        let token = self.sampler.select(logits)?;
        if (self.ignore_eos || !self.tokenizer.is_eos(token))
            && let Some(entry) = self.entry(logits, token)?
        {
            self.entries.waiting.push_back((self.entries.generated_bytes, entry));
        }
        Ok(self.take(token))
    }

    /// The log probability of `token`, where they are wanted.
    fn entry(&self, logits: &[f32], token: TokenId) -> Result<Option<TokenLogprob>, RunError> {
        let bytes_of = |id| self.tokenizer.token_bytes(id).into_owned();
        self.entries.top.map(|top| logprobs::token_logprob(logits, token, top, bytes_of)).transpose()
    }

    fn emit(&mut self, token: TokenId) -> Option<Piece> {
        let mut told = self.append(token);
        let mut reason = self.reason_to_end();
        if reason.is_none() && self.has_thought_enough() {
            reason = self.close_thoughts(&mut told);
        }
        if let Some(reason) = reason {
            self.close(reason, &mut told);
        }
        self.piece(told)
    }

    /// Makes `token` part of the sequence; returns the text that this makes certain.
    fn append(&mut self, token: TokenId) -> Thoughts {
        self.tokens.push(token);
        self.sampler.accept(token);
        if !self.tokenizer.is_control(token) {
            self.entries.generated_bytes += self.tokenizer.token_bytes(token).len();
        }
        let text = self.stream.push(token);
        let text = self.stop.push(&text);
        let told = self.tell(&text);
        if let Some(thoughts) = &mut self.thoughts
            && thoughts.parser.is_thinking()
        {
            thoughts.tokens += 1;
        }
        told
    }

    /// Tells thoughts from answer.
    fn tell(&mut self, text: &str) -> Thoughts {
        self.entries.given_bytes += text.len();
        match &mut self.thoughts {
            Some(thoughts) => thoughts.parser.push(text),
            None => Thoughts { answer: text.to_owned(), ..Thoughts::default() },
        }
    }

    fn reason_to_end(&self) -> Option<FinishReason> {
        if self.stop.matched().is_some() {
            Some(FinishReason::StopString)
        } else if self.generated().len() >= self.max_tokens {
            Some(FinishReason::MaxTokens)
        } else if self.tokens.len() > self.limits.positions {
            Some(FinishReason::ContextFull)
        } else {
            None
        }
    }

    fn has_thought_enough(&self) -> bool {
        self.thoughts.as_ref().is_some_and(|thoughts| {
            let is_over = thoughts.budget.is_some_and(|budget| thoughts.tokens >= budget);
            is_over && !thoughts.is_closed && thoughts.parser.is_thinking()
        })
    }

    /// Closes the block of thoughts for the model, once. Where that leaves no room for an answer the sequence ends.
    fn close_thoughts(&mut self, told: &mut Thoughts) -> Option<FinishReason> {
        let closing = self.thoughts.as_mut().map(|thoughts| {
            thoughts.is_closed = true;
            std::mem::take(&mut thoughts.closing)
        })?;
        if closing.is_empty() || self.generated().len() + closing.len() >= self.max_tokens {
            return Some(FinishReason::MaxTokens);
        }
        if self.tokens.len() + closing.len() > self.limits.positions {
            return Some(FinishReason::ContextFull);
        }
        for token in closing {
            told.append(self.append(token));
            if self.stop.matched().is_some() {
                return Some(FinishReason::StopString);
            }
        }
        None
    }

    /// Ends the text: a stop string that the last characters completed wins over `reason`.
    fn close(&mut self, reason: FinishReason, told: &mut Thoughts) {
        let rest = self.stream.flush();
        let mut text = self.stop.push(&rest);
        if self.stop.matched().is_some() {
            self.finish = Some(FinishReason::StopString);
        } else {
            text.push_str(&self.stop.flush());
            self.finish = Some(reason);
        }
        told.append(self.tell(&text));
        if let Some(thoughts) = &mut self.thoughts {
            told.append(thoughts.parser.flush());
        }
    }

    fn piece(&mut self, told: Thoughts) -> Option<Piece> {
        let Thoughts { reasoning, answer: text } = told;
        self.text.push_str(&text);
        self.reasoning.push_str(&reasoning);
        let all = self.finish.is_some() && self.stop.matched().is_none();
        let logprobs = self.entries.due(all);
        if text.is_empty() && reasoning.is_empty() && logprobs.is_empty() {
            return None;
        }
        let tokens = self.tokens[self.unreported..].to_vec();
        self.unreported = self.tokens.len();
        Some(Piece { text, reasoning, tokens, logprobs, is_echo: false })
    }
}

/// Log probabilities that wait for their text.
struct Entries {
    top: Option<usize>,
    waiting: VecDeque<(usize, TokenLogprob)>,
    /// Bytes of all emitted tokens.
    generated_bytes: usize,
    /// Of these, bytes that were given out.
    given_bytes: usize,
}

impl Entries {
    fn new(top: Option<usize>) -> Self {
        Self { top, waiting: VecDeque::new(), generated_bytes: 0, given_bytes: 0 }
    }

    /// Those whose start lies before the end of the text that was given out, or all.
    fn due(&mut self, all: bool) -> Vec<TokenLogprob> {
        let mut due = Vec::new();
        while self.waiting.front().is_some_and(|(start, _)| all || *start < self.given_bytes) {
            due.extend(self.waiting.pop_front().map(|(_, entry)| entry));
        }
        due
    }
}

/// Finds out what is wrong with a request.
pub(crate) fn check_request(request: &GenerationRequest, limits: SequenceLimits) -> Result<(), RequestError> {
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
    request.sampling.validate()?;
    if let Some(&token) = request.sampling.logit_bias.keys().find(|&&token| token as usize >= limits.vocab_size) {
        return Err(RequestError::UnknownBias { token, vocab_size: limits.vocab_size });
    }
    match request.logprobs {
        Some(found) if found > MAX_TOP_LOGPROBS => Err(RequestError::TopLogprobs { found, limit: MAX_TOP_LOGPROBS }),
        _ => Ok(()),
    }
}

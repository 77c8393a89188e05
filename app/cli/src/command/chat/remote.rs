//! A model on a server with the OpenAI interface.

use super::{Figures, Partner, Reply};
use crate::Host;
use crate::args::{GenerationArgs, ThinkMode};
use crate::client::{ApiError, Client, connect};
use crate::environment::Setting;
use crate::error::CliError;
use crate::thoughts::Speaker;
use npuhal_models::sequence::Piece;
use npuhal_models::template::ChatMessage;
use serde_json::{Map, Value, json};
use std::ffi::OsStr;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

const PATH: &str = "/v1/chat/completions";
/// How long a server may be silent.
const PATIENCE: Duration = Duration::from_secs(300);
/// How soon an interrupt is seen while a server is silent.
const GLANCE: Duration = Duration::from_millis(50);

pub(super) struct Remote<'a> {
    args: &'a GenerationArgs,
    client: Arc<Client>,
    model: String,
}

impl<'a> Remote<'a> {
    /// Asks the server at `url` for its models; without `model` its first one answers.
    pub(super) fn connect(
        host: &Host,
        url: &Setting,
        key: Option<&str>,
        model: Option<&OsStr>,
        args: &'a GenerationArgs,
    ) -> Result<Self, CliError> {
        if args.speculate.is_some() || args.think_budget.is_some() {
            let message =
                "--speculate and --think-budget are for a model that runs here; a server is not asked for them";
            return Err(CliError::Usage(message.to_owned()));
        }
        let client = connect(url, key, PATIENCE)?;
        let model = match model {
            Some(model) => model.to_string_lossy().into_owned(),
            None => client.first_model()?,
        };
        host.voice.note(format_args!("{model} at {}", client.base()));
        Ok(Self { args, client: Arc::new(client), model })
    }

    /// Fields that have OpenAI's or this program's own default are left out, so that other servers are not asked for what they do
    /// not know. The temperature is not: here it is 0.
    fn body(&self, messages: &[ChatMessage]) -> Value {
        let args = self.args;
        let mut body = Map::new();
        body.insert("model".to_owned(), json!(self.model));
        body.insert("messages".to_owned(), json!(messages));
        body.insert("stream".to_owned(), json!(true));
        body.insert("stream_options".to_owned(), json!({"include_usage": true}));
        let mut add = |field: &str, is_set: bool, value: Value| {
            if is_set {
                body.insert(field.to_owned(), value);
            }
        };
        add("max_tokens", args.max_tokens.is_some(), json!(args.max_tokens));
        // Greedy is npuhal's default, not that of every server.
        add("temperature", true, json!(args.temperature.unwrap_or(0.0)));
        add("top_p", args.top_p.is_some(), json!(args.top_p));
        add("top_k", args.top_k.is_some(), json!(args.top_k));
        add("min_p", args.min_p.is_some(), json!(args.min_p));
        add("repetition_penalty", args.repetition_penalty.is_some(), json!(args.repetition_penalty));
        add("presence_penalty", args.presence_penalty != 0.0, json!(args.presence_penalty));
        add("frequency_penalty", args.frequency_penalty != 0.0, json!(args.frequency_penalty));
        let biases: Map<String, Value> =
            args.logit_bias.iter().map(|(id, bias)| (id.to_string(), json!(bias))).collect();
        add("logit_bias", !biases.is_empty(), Value::Object(biases));
        add("seed", args.seed.is_some(), json!(args.seed));
        add("stop", !args.stop.is_empty(), json!(args.stop));
        let thinks = args.think.map(|mode| mode != ThinkMode::Off);
        add("chat_template_kwargs", thinks.is_some(), json!({"enable_thinking": thinks}));
        Value::Object(body)
    }

    /// The events of the answer, read by a thread of their own so that an interrupt is seen while the server is silent. The thread
    /// ends with the next event after the receiver is gone.
    fn events(&self, body: Value) -> Receiver<Result<Value, ApiError>> {
        let (sender, events) = channel();
        let client = Arc::clone(&self.client);
        std::thread::spawn(move || match client.stream(PATH, &body) {
            Ok(stream) => {
                for event in stream {
                    if sender.send(event).is_err() {
                        break;
                    }
                }
            }
            // A receiver that is gone does not want to know.
            Err(error) => drop(sender.send(Err(error))),
        });
        events
    }

    /// `error`, with the models there are where the model is not one of them.
    fn explained(&self, error: ApiError) -> CliError {
        if let ApiError::Status { status: 404, .. } = &error
            && let Ok(models) = self.client.models()
            && !models.contains(&self.model)
        {
            return CliError::Unusable(format!("{error}; the server has: {}", models.join(", ")));
        }
        error.into()
    }
}

impl Partner for Remote<'_> {
    fn answer(&mut self, host: &Host, messages: &[ChatMessage]) -> Result<Reply, CliError> {
        let asked = Instant::now();
        let events = self.events(self.body(messages));
        let mut speaker = Speaker::new(self.args);
        let mut answer = Answer::default();
        let end = loop {
            if host.control.check().is_err() {
                break Err(CliError::Interrupted);
            }
            match events.recv_timeout(GLANCE) {
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break Ok(()),
                Ok(Err(error)) => break Err(self.explained(error)),
                Ok(Ok(event)) => {
                    let piece = answer.take(&event, asked);
                    if let Err(error) = speaker.say(&piece) {
                        break Err(error.into());
                    }
                }
            }
        };
        match &end {
            Ok(()) => speaker.end_line().map(drop)?,
            Err(error) => speaker.break_off(matches!(error, CliError::Interrupted))?,
        }
        end?;
        if let Some(lost) = answer.truncation() {
            host.voice.note(format_args!("the server cut the prompt to its context: {lost}"));
        }
        Ok(answer.into_reply())
    }

    fn models(&self, _: &Host) -> Result<String, CliError> {
        Ok(format!("Available models: {}", self.client.models()?.join(", ")))
    }
}

/// What has come of an answer.
#[derive(Default)]
struct Answer {
    text: String,
    reasoning: String,
    usage: Value,
    /// What npuhal's own server tells of its work.
    stats: Value,
    finish_reason: Option<String>,
    first: Option<Duration>,
    last: Duration,
}

impl Answer {
    /// Notes an event, and returns what is new in it.
    fn take(&mut self, event: &Value, asked: Instant) -> Piece {
        let choice = &event["choices"][0];
        let text = |field: &str| choice["delta"][field].as_str().unwrap_or_default().to_owned();
        let piece = Piece { text: text("content"), reasoning: text("reasoning_content"), ..Piece::default() };
        if !piece.text.is_empty() || !piece.reasoning.is_empty() {
            self.last = asked.elapsed();
            self.first.get_or_insert(self.last);
        }
        self.text.push_str(&piece.text);
        self.reasoning.push_str(&piece.reasoning);
        if let Some(reason) = choice["finish_reason"].as_str() {
            self.finish_reason = Some(reason.to_owned());
        }
        for (field, slot) in [("usage", &mut self.usage), ("x_npuhal_stats", &mut self.stats)] {
            if event[field].is_object() {
                slot.clone_from(&event[field]);
            }
        }
        piece
    }

    /// What the prompt lost, where it lost something.
    fn truncation(&self) -> Option<&Value> {
        let record = &self.stats["prompt_truncation"];
        let is_lossy = |value: &Value| value.as_bool() == Some(true) || value.as_u64().is_some_and(|count| count > 0);
        record.as_object().is_some_and(|fields| fields.values().any(is_lossy)).then_some(record)
    }

    fn into_reply(self) -> Reply {
        let tokens = self.usage["completion_tokens"].as_u64();
        let between = (self.last - self.first.unwrap_or_default()).as_secs_f64();
        let measured = tokens.filter(|tokens| *tokens > 1 && between > 0.0).map(|tokens| (tokens - 1) as f64 / between);
        let tokens_per_second = self.stats["decode_tokens_per_second"].as_f64().or(measured);
        let first_token_seconds = self.first.unwrap_or_default().as_secs_f64();
        let count = |count: Option<u64>| count.map_or_else(|| "?".to_owned(), |count| count.to_string());
        let mut line = format!(
            "prompt {} tokens ({} cached), first token after {:.0} ms; {} tokens at {}; ended by {}",
            count(self.usage["prompt_tokens"].as_u64()),
            count(self.usage["prompt_tokens_details"]["cached_tokens"].as_u64()),
            first_token_seconds * 1e3,
            count(tokens),
            tokens_per_second.map_or_else(|| "-".to_owned(), |rate| format!("{rate:.1} tok/s")),
            self.stats["finish_reason"].as_str().or(self.finish_reason.as_deref()).unwrap_or("the server"),
        );
        if let Some(seed) = self.stats["sampling"]["seed"].as_u64() {
            line.push_str(&format!("; seed {seed}"));
        }
        let figures = Figures { line, tokens, tokens_per_second, first_token_seconds, peak_memory_bytes: None };
        Reply { text: self.text, reasoning: self.reasoning, figures }
    }
}

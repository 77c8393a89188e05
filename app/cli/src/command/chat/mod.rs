//! `npuhal chat`: a conversation in the terminal, with a model that runs here or on a server.

mod local;
mod remote;

use crate::Host;
use crate::args::{ChatArgs, GenerationArgs, ModelArgs};
use crate::client::server;
use crate::environment::Setting;
use crate::error::CliError;
use crate::terminal::complain;
use local::Local;
use npuhal_models::template::ChatMessage;
use remote::Remote;
use rustyline::DefaultEditor;
use rustyline::error::ReadlineError;
use std::path::PathBuf;

const HELP: &str = "\
/reset   forget the conversation (the system message stays)
/stats   figures of the last answer
/models  models that can be had
/exit    end (also /quit, Ctrl-D)
Ctrl-C stops an answer; a line that ends in \\ goes on.";

/// Who answers.
trait Partner {
    /// The answer to `messages`, said as it comes, and the end of its line.
    fn answer(&mut self, host: &Host, messages: &[ChatMessage]) -> Result<Reply, CliError>;

    /// The models that can be had, for people.
    fn models(&self, host: &Host) -> Result<String, CliError>;
}

/// A complete answer.
struct Reply {
    text: String,
    reasoning: String,
    figures: Figures,
}

/// What an answer amounted to.
struct Figures {
    /// All of it, in a line.
    line: String,
    /// Tokens, where they were told.
    tokens: Option<u64>,
    tokens_per_second: Option<f64>,
    first_token_seconds: f64,
    peak_memory_bytes: Option<u64>,
}

impl Figures {
    /// The line behind a single answer.
    fn short(&self) -> String {
        let or_unknown = |text: Option<String>| text.unwrap_or_else(|| "?".to_owned());
        let mut line = format!(
            "tokens={} tok/s={} TTFT={:.2}s",
            or_unknown(self.tokens.map(|tokens| tokens.to_string())),
            or_unknown(self.tokens_per_second.map(|rate| format!("{rate:.2}"))),
            self.first_token_seconds,
        );
        if let Some(peak_bytes) = self.peak_memory_bytes {
            line.push_str(&format!(" peak_RAM={:.1}MiB", peak_bytes as f64 / (1 << 20) as f64));
        }
        line
    }
}

pub(crate) fn chat(host: &Host, args: &ChatArgs) -> Result<(), CliError> {
    args.generation.check()?;
    let url = server(args.api_url.as_deref(), !args.model.session.is_unset() || args.model.verify)?;
    let open = |host: &Host| partner(host, args, url.as_ref());
    match &args.prompt {
        Some(prompt) => once(host, &args.generation, prompt, open),
        None => converse(host, &args.generation, open),
    }
}

/// A model of the server at `url`, or one that runs here.
fn partner<'a>(host: &Host, args: &'a ChatArgs, url: Option<&Setting>) -> Result<Box<dyn Partner + 'a>, CliError> {
    let Some(url) = url else { return Ok(Box::new(Local::open(host, &args.model, &args.generation)?)) };
    Ok(Box::new(Remote::connect(host, url, args.api_key.as_deref(), args.model.model.as_deref(), &args.generation)?))
}

/// A conversation with a model that runs here.
pub(crate) fn chat_here(host: &Host, model: &ModelArgs, args: &GenerationArgs) -> Result<(), CliError> {
    args.check()?;
    converse(host, args, |host| Ok(Box::new(Local::open(host, model, args)?)))
}

fn opening(args: &GenerationArgs) -> Vec<ChatMessage> {
    args.system.as_deref().map(|system| ChatMessage::new("system", system)).into_iter().collect()
}

/// One answer, and its figures.
fn once<'a>(
    host: &Host,
    args: &GenerationArgs,
    prompt: &str,
    open: impl FnOnce(&Host) -> Result<Box<dyn Partner + 'a>, CliError>,
) -> Result<(), CliError> {
    host.heed_interrupts();
    let mut messages = opening(args);
    messages.push(ChatMessage::new("user", prompt));
    let reply = open(host)?.answer(host, &messages)?;
    host.voice.note(reply.figures.short());
    Ok(())
}

fn converse<'a>(
    host: &Host,
    args: &GenerationArgs,
    open: impl FnOnce(&Host) -> Result<Box<dyn Partner + 'a>, CliError>,
) -> Result<(), CliError> {
    let mut editor = DefaultEditor::new().map_err(|error| CliError::Terminal(error.to_string()))?;
    host.heed_interrupts();
    let mut partner = open(host)?;
    let opening = opening(args);
    let mut messages = opening.clone();
    let mut last: Option<Figures> = None;
    let history = history_path();
    if let Some(path) = &history {
        // The first time there is none.
        let _ = editor.load_history(path);
    }
    host.voice.note("Type a message, or /help.");
    loop {
        host.rest();
        let Some(line) = read(&mut editor)? else { break };
        match line.trim() {
            "" => {}
            "/exit" | "/quit" => break,
            "/help" => host.voice.note(HELP),
            "/reset" => {
                messages.clone_from(&opening);
                host.voice.note("Conversation reset.");
            }
            "/stats" => match &last {
                Some(figures) => complain(&figures.line),
                None => complain("No generation statistics yet."),
            },
            "/models" => match partner.models(host) {
                Ok(text) => complain(text.trim_end()),
                Err(error) => complain(format_args!("npuhal: {error}")),
            },
            command if command.starts_with('/') && !command.contains(char::is_whitespace) => {
                complain(format_args!("{command}: no such command; /help lists them"));
            }
            text => {
                messages.push(ChatMessage::new("user", text));
                let host = host.with_fresh_control();
                match partner.answer(&host, &messages) {
                    Ok(reply) => {
                        if args.stats {
                            host.voice.note(&reply.figures.line);
                        }
                        // Templates leave out the thoughts of earlier turns, or look for them under their own name.
                        let mut message = ChatMessage::new("assistant", reply.text);
                        if !reply.reasoning.is_empty() {
                            message.extra.insert("reasoning_content".to_owned(), reply.reasoning.into());
                        }
                        messages.push(message);
                        last = Some(reply.figures);
                    }
                    // The turn is taken back, so that the conversation stays sound.
                    Err(error) => {
                        if error.is_broken_pipe() {
                            return Err(error);
                        }
                        messages.pop();
                        complain(format_args!("npuhal: {error}; this turn is not kept"));
                    }
                }
            }
        }
    }
    if let Some(path) = &history {
        save_history(&mut editor, path);
    }
    Ok(())
}

/// One message: a line, and those after it as long as they end in a backslash. `None` at the end of input.
fn read(editor: &mut DefaultEditor) -> Result<Option<String>, CliError> {
    let mut text = String::new();
    loop {
        match editor.readline(if text.is_empty() { "> " } else { ". " }) {
            Ok(line) => {
                let more = line.strip_suffix('\\').map(str::to_owned);
                text.push_str(more.as_deref().unwrap_or(&line));
                if more.is_none() {
                    let _ = editor.add_history_entry(text.as_str());
                    return Ok(Some(text));
                }
                text.push('\n');
            }
            Err(ReadlineError::Interrupted) if text.is_empty() => {
                complain("(/exit or Ctrl-D ends the chat)");
            }
            Err(ReadlineError::Interrupted) => text.clear(),
            Err(ReadlineError::Eof) => return Ok(None),
            Err(error) => return Err(CliError::Terminal(error.to_string())),
        }
    }
}

/// `$XDG_STATE_HOME/npuhal/history` or `~/.local/state/npuhal/history`.
fn history_path() -> Option<PathBuf> {
    let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let state = variable("XDG_STATE_HOME").filter(|path| path.is_absolute());
    state.or_else(|| variable("HOME").map(|home| home.join(".local/state"))).map(|state| state.join("npuhal/history"))
}

fn save_history(editor: &mut DefaultEditor, path: &std::path::Path) {
    let saved = path.parent().map_or(Ok(()), std::fs::create_dir_all).is_ok() && editor.save_history(path).is_ok();
    if !saved {
        tracing::info!(path = %path.display(), "the history of the chat could not be saved");
    }
}

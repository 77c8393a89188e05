//! `npuhal chat`: a conversation in the terminal.

use crate::Host;
use crate::args::{GenerationArgs, ModelArgs};
use crate::command::list;
use crate::command::run::{answer, stats_line, tell_phases};
use crate::error::CliError;
use crate::session::plan;
use crate::suggestion;
use crate::terminal::{complain, say};
use crate::window::Prompter;
use npuhal_models::generate::TextGenerator;
use npuhal_models::stats::GenerationStats;
use npuhal_models::template::ChatMessage;
use rustyline::DefaultEditor;
use rustyline::error::ReadlineError;
use std::path::PathBuf;

const HELP: &str = "\
/reset   forget the conversation (the system message stays)
/stats   figures of the last answer
/models  models that are here and those that can be pulled
/exit    end (also /quit, Ctrl-D)
Ctrl-C stops an answer; a line that ends in \\ goes on.";

pub(crate) fn chat(host: &Host, model: &ModelArgs, args: &GenerationArgs) -> Result<(), CliError> {
    args.check()?;
    let mut editor = DefaultEditor::new().map_err(|error| CliError::Terminal(error.to_string()))?;
    host.heed_interrupts();
    let plan = plan(host, model)?;
    let tokenizer = plan.tokenizer(host)?;
    let prompter = Prompter::new(&plan.model, &tokenizer)?;
    let mut generator = TextGenerator::new(plan.open()?);
    let suggested = suggestion::follow(host, plan.model.suggested_sampling(), args, &generator);
    let opening: Vec<ChatMessage> =
        args.system.as_deref().map(|system| ChatMessage::new("system", system)).into_iter().collect();
    let mut messages = opening.clone();
    let mut last: Option<GenerationStats> = None;
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
                Some(stats) => complain(stats_line(stats)),
                None => complain("No generation statistics yet."),
            },
            "/models" => match list::text(host, false) {
                Ok(text) => complain(text.trim_end()),
                Err(error) => complain(format_args!("npuhal: {error}")),
            },
            command if command.starts_with('/') && !command.contains(char::is_whitespace) => {
                complain(format_args!("{command}: no such command; /help lists them"));
            }
            text => {
                messages.push(ChatMessage::new("user", text));
                let host = host.with_fresh_control();
                let answered = prompter
                    .fitted(&host, args, &messages, generator.positions())
                    .and_then(|ids| answer(&host, args, &mut generator, &tokenizer, &suggested, ids));
                match answered {
                    Ok(answer) => {
                        say("\n")?;
                        if args.stats {
                            host.voice.note(stats_line(&answer.stats));
                        }
                        tell_phases(&host, &generator);
                        // Templates leave out the thoughts of earlier turns, or look for them under their own name.
                        let mut message = ChatMessage::new("assistant", answer.text);
                        if !answer.reasoning.is_empty() {
                            message.extra.insert("reasoning_content".to_owned(), answer.reasoning.into());
                        }
                        messages.push(message);
                        last = Some(answer.stats);
                    }
                    // The turn is taken back, so that the conversation stays sound.
                    Err(error) => {
                        if error.is_broken_pipe() {
                            return Err(error);
                        }
                        messages.pop();
                        say("\n")?;
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

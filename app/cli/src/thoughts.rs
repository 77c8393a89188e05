//! Answers of models that think first: what is asked of the template, and how thoughts are shown.

use crate::args::{GenerationArgs, ThinkMode};
use crate::error::CliError;
use crate::terminal::say;
use npuhal_models::Tokenizer;
use npuhal_models::sequence::Piece;
use npuhal_models::template::ChatInput;
use npuhal_models::thinking::{Thinking, closing_ids, prompt_opens_thoughts};
use std::io::{self, IsTerminal};

const DIM: &str = "\x1b[2m";
const PLAIN: &str = "\x1b[0m";

/// Sets what templates know as `enable_thinking`, where the user has said so.
pub(crate) fn ask(args: &GenerationArgs, mut input: ChatInput) -> ChatInput {
    if let Some(mode) = args.think {
        input.kwargs.insert("enable_thinking".to_owned(), (mode != ThinkMode::Off).into());
    }
    input
}

/// How the model thinks before the answer to `prompt`.
pub(crate) fn thinking(args: &GenerationArgs, tokenizer: &Tokenizer, prompt: &[u32]) -> Result<Thinking, CliError> {
    Ok(Thinking {
        opened: prompt_opens_thoughts(tokenizer, prompt),
        budget: args.think_budget.map(|tokens| tokens as usize),
        closing: if args.think_budget.is_some() { closing_ids(tokenizer)? } else { Vec::new() },
    })
}

/// Prints thoughts and answer as they come.
pub(crate) struct Speaker {
    shows_thoughts: bool,
    is_dim: bool,
    /// Whether what was printed last leaves a line open.
    is_in_line: bool,
}

impl Speaker {
    /// Thoughts are shown at a terminal only, so that what is piped is the answer.
    pub(crate) fn new(args: &GenerationArgs) -> Self {
        let shows_thoughts = args.think != Some(ThinkMode::Hide) && io::stdout().is_terminal();
        Self { shows_thoughts, is_dim: false, is_in_line: false }
    }

    pub(crate) fn say(&mut self, part: &Piece) -> io::Result<()> {
        if self.shows_thoughts && !part.reasoning.is_empty() {
            if !self.is_dim {
                say(DIM)?;
                self.is_dim = true;
            }
            say(&part.reasoning)?;
            self.is_in_line = !part.reasoning.ends_with('\n');
        }
        if part.text.is_empty() {
            return Ok(());
        }
        if self.is_dim {
            self.finish()?;
            say("\n\n")?;
        }
        self.is_in_line = !part.text.ends_with('\n');
        say(&part.text)
    }

    /// Leaves the terminal as it was.
    pub(crate) fn finish(&mut self) -> io::Result<()> {
        if std::mem::take(&mut self.is_dim) { say(PLAIN) } else { Ok(()) }
    }

    /// Ends a line that is open; tells whether one was.
    pub(crate) fn end_line(&mut self) -> io::Result<bool> {
        self.finish()?;
        let is_open = std::mem::take(&mut self.is_in_line);
        if is_open {
            say("\n")?;
        }
        Ok(is_open)
    }

    /// Ends the line of an answer that broke off: the message that follows on stderr has a line of its own. A terminal shows
    /// `^C` where an interrupt was typed.
    pub(crate) fn break_off(&mut self, is_interrupt: bool) -> io::Result<()> {
        if !self.end_line()? && is_interrupt && io::stdout().is_terminal() { say("\n") } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::{Cli, Command};
    use clap::Parser;
    use npuhal_models::ChatMessage;

    fn args(flags: &[&str]) -> GenerationArgs {
        let all = ["npuhal", "run", "hi"].iter().chain(flags);
        match Cli::try_parse_from(all).unwrap().command {
            Command::Run(args) => args.generation,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_template_is_asked_only_where_the_user_has_said_so() {
        let asked = |flags: &[&str]| {
            let input = ChatInput::new(vec![ChatMessage::new("user", "hi")]);
            ask(&args(flags), input).kwargs.get("enable_thinking").cloned()
        };
        assert_eq!(asked(&[]), None);
        assert_eq!(asked(&["--think", "off"]), Some(false.into()));
        assert_eq!(asked(&["--think", "on"]), Some(true.into()));
        assert_eq!(asked(&["--think", "hide"]), Some(true.into()));
    }

    #[test]
    fn budgets_are_at_least_one_token() {
        assert_eq!(args(&["--think-budget", "7"]).think_budget, Some(7));
        assert!(Cli::try_parse_from(["npuhal", "run", "hi", "--think-budget", "0"]).is_err());
    }
}

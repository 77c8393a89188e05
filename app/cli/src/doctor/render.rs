//! The report as text and as JSON.

use super::{Check, Report, Status};
use serde_json::{Value, json};

impl Report {
    /// For people.
    pub(crate) fn text(&self) -> String {
        let width = self.checks.iter().map(|check| label(check).len()).max().unwrap_or(0);
        let mut text = String::new();
        for check in &self.checks {
            // A check that found nothing starts with what is wrong.
            let facts = if check.found.is_empty() { &check.issues[..] } else { &check.found[..] };
            let issues = if check.found.is_empty() { &[][..] } else { &check.issues[..] };
            text.push_str(format!("{} {:width$}  {}", badge(check.status), label(check), facts.join("; ")).trim_end());
            text.push('\n');
            for issue in issues {
                text.push_str(&format!("{:indent$}{issue}\n", "", indent = width + 6));
            }
        }
        let remedies: Vec<&str> =
            self.by_severity().flat_map(|check| &check.remedies).map(|r| r.text.as_str()).collect();
        let mut unique: Vec<&str> = Vec::new();
        for remedy in remedies {
            if !unique.contains(&remedy) {
                unique.push(remedy);
            }
        }
        section(
            &mut text,
            "What to do",
            &unique.iter().enumerate().map(|(i, r)| format!("{}. {r}", i + 1)).collect::<Vec<_>>(),
        );
        section(&mut text, "Not tried", &self.not_tried.iter().map(|what| format!("- {what}")).collect::<Vec<_>>());
        text.push_str(&format!("\n{}: {}\nNext: {}\n", self.overall().name(), self.verdict, self.next_command));
        text
    }

    /// For programs. The names of the fields and of the three states do not change.
    pub(crate) fn json(&self) -> String {
        let checks: Vec<Value> = self
            .checks
            .iter()
            .map(|check| {
                json!({
                    "name": check.name,
                    "status": check.status.name(),
                    "found": check.found,
                    "issues": check.issues,
                    "remediation": check.remedies.iter().map(|remedy| remedy.text.as_str()).collect::<Vec<_>>(),
                })
            })
            .collect();
        let document = json!({
            "overall_status": self.overall().name(),
            "checks": checks,
            "not_tried": self.not_tried,
            "verdict": self.verdict,
            "next_command": self.next_command,
        });
        format!("{document:#}\n")
    }

    /// Failed checks first.
    fn by_severity(&self) -> impl Iterator<Item = &Check> {
        [Status::Fail, Status::Warn]
            .into_iter()
            .flat_map(|status| self.checks.iter().filter(move |c| c.status == status))
    }
}

fn badge(status: Status) -> &'static str {
    match status {
        Status::Ok => "[✓]",
        Status::Warn => "[!]",
        Status::Fail => "[✗]",
    }
}

fn label(check: &Check) -> String {
    check.name.replace('_', " ")
}

fn section(text: &mut String, title: &str, lines: &[String]) {
    if lines.is_empty() {
        return;
    }
    text.push_str(&format!("\n{title}:\n"));
    for line in lines {
        text.push_str(&format!("  {line}\n"));
    }
}

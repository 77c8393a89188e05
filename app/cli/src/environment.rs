//! Variables of the environment. An empty one counts as unset.

use crate::error::CliError;

/// The text of a variable.
///
/// # Errors
/// A usage error where it is not UTF-8: a key that cannot be read must not become none.
pub(crate) fn variable(name: &'static str) -> Result<Option<String>, CliError> {
    let Some(value) = std::env::var_os(name).filter(|value| !value.is_empty()) else { return Ok(None) };
    value.into_string().map(Some).map_err(|_| CliError::Usage(format!("{name}: the variable is not UTF-8 text")))
}

/// What the user has set, and where.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Setting {
    pub(crate) value: String,
    /// The flag or the variable, for messages.
    pub(crate) source: &'static str,
}

impl Setting {
    /// What `flag` says, or else `variable`.
    ///
    /// # Errors
    /// As [`variable()`].
    pub(crate) fn of(
        flag: &'static str,
        given: Option<&str>,
        variable: &'static str,
    ) -> Result<Option<Self>, CliError> {
        match given {
            Some(value) => Ok(Some(Self { value: value.to_owned(), source: flag })),
            None => Ok(self::variable(variable)?.map(|value| Self { value, source: variable })),
        }
    }
}

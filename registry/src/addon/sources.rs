//! Where add-ons are looked for.

use super::AddonError;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// The places that name add-ons, in load order: later ones have precedence.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct AddonSources {
    /// The add-on folder: every `*.so` file in it, by name.
    pub folder: Option<PathBuf>,
    /// Files of the environment.
    pub environment: Vec<PathBuf>,
    /// Files of the command line.
    pub named: Vec<PathBuf>,
}

impl AddonSources {
    /// The places of this process: `$XDG_DATA_HOME/npuhal/addons` or `$HOME/.local/share/npuhal/addons`, the files in
    /// `NPUHAL_ADDONS` (separated by `:`), and `named`. Empty variables count as unset, as does a relative `XDG_DATA_HOME`
    /// (XDG Base Directory Specification).
    #[must_use]
    pub fn of_process(named: Vec<PathBuf>) -> Self {
        Self::from_variables(|name| std::env::var_os(name), named)
    }

    fn from_variables(variable: impl Fn(&str) -> Option<OsString>, named: Vec<PathBuf>) -> Self {
        let set = |name: &str| variable(name).filter(|value| !value.is_empty());
        let data = set("XDG_DATA_HOME").map(PathBuf::from).filter(|path| path.is_absolute());
        let data = data.or_else(|| set("HOME").map(|home| PathBuf::from(home).join(".local/share")));
        let listed = set("NPUHAL_ADDONS").unwrap_or_default();
        let environment = std::env::split_paths(&listed).filter(|path| !path.as_os_str().is_empty()).collect();
        Self { folder: data.map(|data| data.join("npuhal/addons")), environment, named }
    }

    /// The files, each once: one that is named again keeps its first place. With them [`AddonError::Unreadable`] for a folder
    /// that is there but cannot be listed; the other places count all the same.
    #[must_use]
    pub fn files(&self) -> (Vec<PathBuf>, Option<AddonError>) {
        let (mut candidates, error) = match self.folder.as_deref().map(libraries_in) {
            None => (Vec::new(), None),
            Some(Ok(files)) => (files, None),
            Some(Err(error)) => (Vec::new(), Some(error)),
        };
        candidates.extend(self.environment.iter().chain(&self.named).cloned());
        let mut files: Vec<PathBuf> = Vec::new();
        let mut seen: Vec<PathBuf> = Vec::new();
        for file in candidates {
            let canonical = file.canonicalize().unwrap_or_else(|_| file.clone());
            if !seen.contains(&canonical) {
                seen.push(canonical);
                files.push(file);
            }
        }
        (files, error)
    }
}

fn libraries_in(folder: &Path) -> Result<Vec<PathBuf>, AddonError> {
    let unreadable =
        |error: std::io::Error| AddonError::Unreadable { file: folder.to_owned(), reason: error.to_string() };
    let entries = match std::fs::read_dir(folder) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(unreadable)?,
    };
    let paths = entries.map(|entry| entry.map(|entry| entry.path())).collect::<Result<Vec<_>, _>>();
    let mut paths = paths.map_err(unreadable)?;
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "so"));
    paths.sort();
    Ok(paths)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sources(variables: &[(&str, &str)]) -> AddonSources {
        let find = |name: &str| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| OsString::from(value));
        AddonSources::from_variables(find, vec![PathBuf::from("c.so")])
    }

    #[test]
    fn the_folder_comes_first_and_the_command_line_last() {
        let found = sources(&[("XDG_DATA_HOME", "/x"), ("HOME", "/h"), ("NPUHAL_ADDONS", "/a.so::/b.so")]);
        assert_eq!(found.folder.as_deref(), Some(Path::new("/x/npuhal/addons")));
        assert_eq!(found.environment, ["/a.so", "/b.so"].map(PathBuf::from));
        let odd = sources(&[("XDG_DATA_HOME", "relative"), ("HOME", "/h"), ("NPUHAL_ADDONS", "")]);
        assert_eq!(odd.folder.as_deref(), Some(Path::new("/h/.local/share/npuhal/addons")));
        assert_eq!(odd.environment, Vec::<PathBuf>::new());
        assert_eq!(sources(&[]).folder, None);
    }

    #[test]
    fn libraries_of_the_folder_are_sorted_and_a_file_counts_once() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["b.so", "a.so", "readme.txt"] {
            std::fs::write(folder.path().join(name), "").unwrap();
        }
        let again = folder.path().join("../").join(folder.path().file_name().unwrap()).join("a.so");
        let sources = AddonSources {
            folder: Some(folder.path().to_owned()),
            environment: vec![PathBuf::from("/no/such.so")],
            named: vec![again],
        };
        let (files, error) = sources.files();
        let wanted = [folder.path().join("a.so"), folder.path().join("b.so"), PathBuf::from("/no/such.so")];
        assert_eq!((files.as_slice(), error), (wanted.as_slice(), None));
        let missing = AddonSources { folder: Some(folder.path().join("none")), ..AddonSources::default() };
        assert_eq!(missing.files(), (Vec::new(), None));
        let not_a_folder = AddonSources { folder: Some(folder.path().join("a.so")), ..AddonSources::default() };
        assert!(matches!(not_a_folder.files().1, Some(AddonError::Unreadable { .. })));
    }
}

//! The machine under examination: this one, or a directory with the pseudo file systems of another.

use npuhal_amdxdna::discovery::{Identity, MODULE, Roots};
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

/// Pseudo files are read up to this size.
const SMALL_FILE_LIMIT_BYTES: u64 = 4 << 20;

/// Where to look.
#[derive(Debug, Clone)]
pub(crate) struct Machine {
    root: PathBuf,
    roots: Roots,
    identity: Identity,
    is_this: bool,
}

impl Machine {
    /// The machine that runs this program, and the user who does.
    pub(crate) fn this() -> Self {
        Self { root: "/".into(), roots: Roots::default(), identity: Identity::current(), is_this: true }
    }

    /// A tree with `sys`, `dev`, `proc`, `etc` and `var/log` of a machine. The user is the one of `proc/self`, where it is
    /// there.
    pub(crate) fn at(root: &Path) -> Self {
        let text = |name: &str| fs::read_to_string(root.join("proc/self").join(name)).unwrap_or_default();
        let identity = identity(&text("status"), &text("limits"));
        Self { root: root.to_owned(), roots: Roots::inside(root), identity, is_this: false }
    }

    pub(crate) fn is_this(&self) -> bool {
        self.is_this
    }

    pub(crate) fn roots(&self) -> &Roots {
        &self.roots
    }

    pub(crate) fn identity(&self) -> &Identity {
        &self.identity
    }

    /// A path of the machine, e.g. `proc/cpuinfo`.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.root.join(name)
    }

    /// A small text file.
    pub(crate) fn text(&self, name: &str) -> Option<String> {
        let mut bytes = Vec::new();
        let path = self.path(name);
        // A pipe in a tree would be waited for.
        fs::metadata(&path).ok().filter(fs::Metadata::is_file)?;
        File::open(path).ok()?.take(SMALL_FILE_LIMIT_BYTES).read_to_end(&mut bytes).ok()?;
        Some(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// Whether the loaded module does not come with the kernel; `None` where no module is loaded or it is not said.
    pub(crate) fn is_module_out_of_tree(&self) -> Option<bool> {
        Some(self.text(&format!("sys/module/{MODULE}/taint"))?.contains('O'))
    }

    /// Programs of other users and this one that hold `node` open, as far as this user may see: `name (pid 1234)`.
    pub(crate) fn holders(&self, node: &Path) -> Vec<String> {
        let wanted = Path::new("/").join(node.strip_prefix(&self.root).unwrap_or(node));
        let mut holders = Vec::new();
        for process in fs::read_dir(self.path("proc")).into_iter().flatten().flatten() {
            let Some(pid) = process.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
            if self.is_this && pid == std::process::id() {
                continue;
            }
            let mut files = fs::read_dir(process.path().join("fd")).into_iter().flatten().flatten();
            if files.any(|file| fs::read_link(file.path()).is_ok_and(|target| target == wanted)) {
                let name = fs::read_to_string(process.path().join("comm")).unwrap_or_default();
                holders.push(format!("{} (pid {pid})", name.trim()));
            }
        }
        holders.sort();
        holders
    }
}

/// The end of a file, up to `limit_bytes`.
pub(crate) fn tail(path: &Path, limit_bytes: u64) -> io::Result<String> {
    let mut file = File::open(path)?;
    let len_bytes = file.metadata()?.len();
    if len_bytes > limit_bytes {
        file.seek(SeekFrom::Start(len_bytes - limit_bytes))?;
    }
    let mut bytes = Vec::new();
    file.take(limit_bytes).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// From `/proc/self/status` and `/proc/self/limits`. What is missing there is taken from this process.
fn identity(status: &str, limits: &str) -> Identity {
    let mut identity = Identity { is_self: false, ..Identity::current() };
    let numbers = |key: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(key))?;
        Some(line.split_whitespace().filter_map(|word| word.parse().ok()).collect::<Vec<u32>>())
    };
    // The second number of both lines is the effective one.
    if let Some(&user) = numbers("Uid:").as_deref().and_then(|ids| ids.get(1)) {
        identity.user = user;
        identity.groups = numbers("Groups:").unwrap_or_default();
        identity.groups.extend(numbers("Gid:").as_deref().and_then(|ids| ids.get(1)));
        identity.groups.sort_unstable();
        identity.groups.dedup();
    }
    let locked = limits.lines().find_map(|line| line.strip_prefix("Max locked memory"));
    if let Some(soft) = locked.and_then(|line| line.split_whitespace().next()) {
        identity.memlock_bytes = soft.parse().ok();
    }
    identity
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_user_of_a_tree_is_read_from_its_proc() {
        let status = "Name:\tbash\nUid:\t1000\t1000\t1000\t1000\nGid:\t1000\t1000\t1000\t1000\nGroups:\t27 992 1000 \n";
        let limits = "Limit                     Soft Limit           Hard Limit           Units     \n\
                      Max locked memory         8388608              8388608              bytes     \n";
        let user = identity(status, limits);
        assert_eq!((user.user, user.groups, user.memlock_bytes), (1000, vec![27, 992, 1000], Some(8 << 20)));
        assert!(!user.is_self);
        let unlimited = identity(status, "Max locked memory         unlimited            unlimited            bytes");
        assert_eq!(unlimited.memlock_bytes, None);
        assert_eq!(identity("", "").user, Identity::current().user);
    }

    #[test]
    fn the_end_of_a_long_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log");
        fs::write(&path, "0123456789").unwrap();
        assert_eq!(tail(&path, 4).unwrap(), "6789");
        assert_eq!(tail(&path, 40).unwrap(), "0123456789");
    }
}

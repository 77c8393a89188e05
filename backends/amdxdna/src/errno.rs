//! Error numbers of the driver, and what each of them means for each operation.

use std::fmt;

/// An error number as a driver call returned it. Meaningless without its operation: see [`crate::error::explain`].
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Errno(i32);

macro_rules! errno_table {
    ($($name:ident = $number:literal),* $(,)?) => {
        impl Errno {
            $(#[doc = concat!("`", stringify!($name), "`, ", stringify!($number), " on Linux.")]
            pub const $name: Self = Self($number);)*

            /// The symbolic name, e.g. `ENOSPC`; `errno N` for a number outside the table.
            #[must_use]
            pub fn name(self) -> String {
                match self.0 {
                    $($number => stringify!($name).to_owned(),)*
                    other => format!("errno {other}"),
                }
            }
        }
    };
}

errno_table! {
    EPERM = 1, ENOENT = 2, EINTR = 4, EIO = 5, E2BIG = 7, EBADF = 9, EAGAIN = 11, ENOMEM = 12, EACCES = 13, EFAULT = 14,
    EBUSY = 16, EEXIST = 17, ENODEV = 19, EINVAL = 22, ENFILE = 23, EMFILE = 24, ENOTTY = 25, ENOSPC = 28, ERANGE = 34,
    ENOSYS = 38, ETIME = 62, EOPNOTSUPP = 95, ETIMEDOUT = 110, ECANCELED = 125,
}

impl Errno {
    /// Wraps a positive error number.
    #[must_use]
    pub const fn from_raw(number: i32) -> Self {
        Self(number)
    }

    /// The positive error number.
    #[must_use]
    pub const fn raw(self) -> i32 {
        self.0
    }

    /// Whether the call has no effect yet and is repeated as it is. Not for buffer creation, where `EAGAIN` asks for a
    /// larger device heap.
    #[must_use]
    pub fn is_retry(self) -> bool {
        matches!(self, Self::EINTR | Self::EAGAIN)
    }
}

impl fmt::Display for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name())
    }
}

impl fmt::Debug for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name())
    }
}

impl From<rustix::io::Errno> for Errno {
    fn from(errno: rustix::io::Errno) -> Self {
        Self(errno.raw_os_error())
    }
}

#[cfg(test)]
mod tests {
    use super::Errno;

    #[test]
    fn names_and_numbers_agree_with_the_system() {
        assert_eq!(Errno::from(rustix::io::Errno::NOSPC), Errno::ENOSPC);
        assert_eq!(Errno::from(rustix::io::Errno::OPNOTSUPP), Errno::EOPNOTSUPP);
        assert_eq!(Errno::from(rustix::io::Errno::TIME), Errno::ETIME);
        assert_eq!(Errno::from(rustix::io::Errno::AGAIN), Errno::EAGAIN);
        assert_eq!(Errno::from(rustix::io::Errno::TOOBIG), Errno::E2BIG);
        assert_eq!(Errno::ENODEV.to_string(), "ENODEV");
        assert_eq!(Errno::from_raw(4095).to_string(), "errno 4095");
    }
}

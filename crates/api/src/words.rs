//! Enums whose values have a name in JSON, on the command line and in texts.

/// Declares such an enum: each value with its name.
macro_rules! words {
    ($(#[$about:meta])* $name:ident { $($(#[$doc:meta])* $value:ident = $word:tt,)+ }) => {
        $(#[$about])*
        #[derive(
            Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize, utoipa::ToSchema,
        )]
        pub enum $name {
            $($(#[$doc])* #[serde(rename = $word)] $value,)+
        }

        impl $name {
            /// Every value.
            pub const ALL: &[$name] = &[$($name::$value),+];

            /// The name used in JSON.
            pub const fn name(self) -> &'static str {
                match self {
                    $($name::$value => $word,)+
                }
            }

            /// The value of that name.
            pub fn from_name(name: &str) -> Option<$name> {
                $name::ALL.iter().copied().find(|value| value.name() == name)
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.pad(self.name())
            }
        }
    };
}

pub(crate) use words;
